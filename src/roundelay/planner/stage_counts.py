"""How many workers and stages a plan gets, and how many slots its edges."""

from __future__ import annotations

from roundelay.errors import CaptureError, PlanError, counted
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.ir.transports import transport_named
from roundelay.lower.reading import read
from roundelay.planner.check_given import check_num_workers
from roundelay.planner.choose_cuts import Cut
from roundelay.planner.cost_model import boundaries_of
from roundelay.planner.draft_plan import PLAIN
from roundelay.planner.given_layout import in_pipeline
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.schedules import holders_of, schedule_named


def num_stages_of(
    graph: Graph, workers: int | None, given_cut: Cut | None, choices: Choices, machine: Hardware, *, requested: bool
) -> tuple[int, str]:
    """How many stages a plan gets, and why fewer than by default, if so.

    Args:
        graph: of the model.
        workers: of each replica of a pipeline, as given.
        given_cut: the cut as given.
        choices: as of :func:`in_layout`, with the rule.
        machine: where it will run.
        requested: whether the number of stages of a layout is given.

    Raises:
        PlanError: the numbers do not fit.
        CaptureError: the model cannot be cut into so many.
    """
    if in_pipeline(choices):
        holders = replicas_of(choices) * parts_of(choices)
        default = default_workers(machine, holders, choices.devices, choices.transport or "memory")
        return count_stages(graph, workers, given_cut, choices.rule or PLAIN, default)
    cut_into = None if given_cut is None else len(given_cut.stages)
    return _stages_in_layout(graph, choices.stages or 0, cut_into, requested=requested)


def _stages_in_layout(graph: Graph, wanted: int, cut: int | None, *, requested: bool) -> tuple[int, str]:
    """The same in a layout, from the number that is given, or by default, and that of the cuts, if these are given."""
    most = len(boundaries_of(graph)) - 1
    if cut is not None and requested and cut != wanted:
        raise PlanError("--stages", got=str(wanted), expected=f"{cut}, as the cuts", remedy="Leave one of them out.")
    if cut is not None or 0 < wanted <= most:
        return cut or wanted, ""
    if requested:
        expected = f"1 to {most}, into which the model can be cut"
        raise PlanError("--stages", got=str(wanted), expected=expected, remedy="Give one of these.")
    return most, f"{counted(most, 'stage')}, not {wanted}: the model cannot be cut into more"


def slots_in_layout(draft: Plan, source: int, target: int) -> int:
    """The slots of an edge: within a worker enough for all micro-batches; else as many as are on the way in time.

    A micro-batch comes every 2S/N steps, and is T - S steps on its way from stage S to stage T, of which the holders
    take it in turns.
    """
    form = read(draft).form
    if form is None or not form.takes_turns:
        return draft.micro_batches
    on_the_way = (target - source) * draft.micro_batches // (2 * draft.num_stages) + 1
    return -(-on_the_way // holders_of(target, draft.num_stages, draft.micro_batches))


def default_devices(machine: Hardware, transport: str) -> str:
    """``cuda`` if there is such a device and the transport can carry its tensors, else ``cpu``."""
    return "cuda" if machine.devices and not transport_named(transport).forks else CPU


def default_workers(machine: Hardware, holders: int = 1, devices: str | None = None, transport: str = "memory") -> int:
    """The default number of workers of a replica; fewer if the model has fewer stages.

    One per device: those that are named, or every GPU if workers compute on GPUs. On the CPU one per core, at most two;
    one where several share a stage, so that R replicas are R workers. All of a cluster that is declared.

    Args:
        machine: where they compute.
        holders: workers that share each stage.
        devices: as ``--devices``.
        transport: of the plan.
    """
    if machine.cluster is not None:
        return max(1, len(machine.cluster.workers) // holders)
    named = default_devices(machine, transport) if devices is None else devices
    if named == CPU:
        return 1 if holders > 1 else min(2, machine.cores)
    count = machine.devices if named == "cuda" else len(named.split(","))
    return max(1, count // holders)


def count_stages(graph: Graph, workers: int | None, given: Cut | None, rule: str, default: int) -> tuple[int, str]:
    """Return the number of stages, as given or for the workers; and why there are fewer than by default, if so.

    Args:
        graph: of the model.
        workers: of each replica, as given.
        given: the cut as given.
        rule: update rule.
        default: number of workers if none is given.

    Raises:
        PlanError: the numbers do not fit.
        CaptureError: the model cannot be cut into so many.
    """
    check_num_workers(workers)
    each = schedule_named(rule_named(rule).schedule).stages_per_worker
    if given is None:
        return _stages_for_workers(len(boundaries_of(graph)) - 1, workers, each, rule, default)
    num_stages = len(given.stages)
    if num_stages % each or workers not in (None, num_stages // each):
        wanted = f"{each} for each worker" if workers is None else f"{each * workers}, {each} for each worker"
        raise PlanError(
            "the cuts",
            got=f"{num_stages} stages",
            expected=wanted if each > 1 else f"{workers}, one for each worker",
            remedy="Name one operation fewer than there are stages, or leave the number of workers out.",
        )
    return num_stages, ""


def _stages_for_workers(pieces: int, workers: int | None, each: int, rule: str, default: int) -> tuple[int, str]:
    """Return the number of stages for the workers given, or for the default number as far as the model can be cut.

    Raises:
        CaptureError: the model cannot be cut into so many.
    """
    most = pieces // each
    wanted = default if workers is None else workers
    if wanted <= most:
        return each * wanted, ""
    limit = f"can be cut into {counted(pieces, 'stage')} at most"
    if workers is None and most:
        return each * most, f"{counted(most, 'worker')}, not {wanted}: the model {limit}"
    per_worker = f", {each} for each worker by {rule}" if each > 1 else ""
    raise CaptureError(
        f"a cut into {each * wanted} stages, for {counted(wanted, 'worker')}",
        got=f"a model that {limit}",
        expected=f"at least {each * wanted} stages{per_worker}",
        remedy=f"Give --workers {most}, or a model of more operations."
        if most
        else "Give another rule: --rule 1f1b, for example, has one stage for each worker.",
    )
