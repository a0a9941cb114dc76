"""How many stages a plan gets in its layout, and how many slots its edges."""

from __future__ import annotations

from roundelay.errors import PlanError, counted
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.lower.reading import read
from roundelay.planner.choices import Choices
from roundelay.planner.cost_model import boundaries_of
from roundelay.planner.draft_plan import PLAIN
from roundelay.planner.given_layout import in_pipeline
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planning.cuts import Cut, count_stages, default_workers
from roundelay.schedules import holders_of


def num_stages_of(
    graph: Graph, workers: int | None, given_cut: Cut | None, choices: Choices, *, requested: bool
) -> tuple[int, str]:
    """How many stages a plan gets, and why fewer than by default, if so.

    Args:
        graph: of the model.
        workers: of each replica of a pipeline, as given.
        given_cut: the cut as given.
        choices: as of :func:`in_layout`, with the rule.
        requested: whether the number of stages of a layout is given.

    Raises:
        PlanError: the numbers do not fit.
        CaptureError: the model cannot be cut into so many.
    """
    if in_pipeline(choices):
        holders = replicas_of(choices) * parts_of(choices)
        default = default_workers(holders, choices.devices, choices.transport or "memory")
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
    if form is None or not form.deals:
        return draft.micro_batches
    on_the_way = (target - source) * draft.micro_batches // (2 * draft.num_stages) + 1
    return -(-on_the_way // holders_of(target, draft.num_stages, draft.micro_batches))
