"""Choose the cuts: measured, predicted, in equal parts, or given by the user; with the reasons in words."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from roundelay.api.recompute_choice import recomputed_ranges
from roundelay.api.torch_scope import in_child, user_code
from roundelay.env import cache_folder, malloc_settings
from roundelay.errors import CaptureError, PlanError, counted
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.frontend.op_profiler import measure_operations
from roundelay.ir.graph import Graph, Profile
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.observe.profile_cache import keep, kept, machine, place
from roundelay.planner.cost_model import CostParameters, Cuts, StageCosts, boundaries_of, roofline, stage_costs
from roundelay.planner.partition_dp import choose_cuts, equal_cuts, names_of
from roundelay.schedules import schedule_named

MEASURED, ROOFLINE, EQUAL = WAYS = ("measured", "roofline", "equal")
"""How cuts are chosen: by a profile of this machine, by fixed constants, or by numbers of operations."""

_GIVEN = ("cuts: as given",)

Stages = tuple[tuple[str, ...], ...]
"""For each stage, the operations that end its segments."""

CutRequest = str | Sequence[Sequence[str]]
"""One of :data:`WAYS`; comma-separated names of the operations that end stages; or :data:`Stages`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The chosen stages.

    Args:
        stages: for each stage, the operations that end its segments.
        reasons: the reasons, in words.
    """

    stages: Stages
    reasons: tuple[str, ...]


def cut_by_names(graph: Graph, request: CutRequest) -> Cut | None:
    """Return the stages if they are given by names, None if they are to be chosen.

    Raises:
        PlanError: a name is unknown, or of no operation after which the graph can be cut.
    """
    if isinstance(request, str):
        return None if request in WAYS else _as_stages(_names(graph, request), _GIVEN)
    if any(isinstance(ends, str) for ends in request):
        raise PlanError(
            "the cuts",
            got=f"a list of {len(request)} names, not of lists of names",
            expected=f"one of {', '.join(WAYS)}, names with commas between them, or a list of names for every stage",
            remedy='For example cuts="equal", or cuts=[["add_1"], ["linear_7"]].',
        )
    return Cut(tuple(tuple(ends) for ends in request), _GIVEN)


def _names(graph: Graph, request: str) -> list[str]:
    names, last = [name.strip() for name in request.split(",")], graph.ops[-1].name
    legal = [*(graph.ops[cut].name for cut in graph.cuts), last]
    for name in names:
        if name not in legal:
            near = difflib.get_close_matches(name, [*WAYS, *legal], n=4, cutoff=0.5)
            known = any(op.name == name for op in graph.ops)
            raise PlanError(
                "the cuts",
                got=f"{name!r}, " + ("an operation after which the graph cannot be cut" if known else "no operation"),
                expected=f"{', '.join(WAYS)}, or names of operations such as {', '.join(near or legal[:4])}",
                remedy="The comments of a plan name the operations that end its stages; "
                "roundelay.capture(job).graph has them all.",
            )
    return names if names[-1] == last else [*names, last]


def default_workers(replicas: int = 1) -> int:
    """The default number of workers of a replica: one per core, at most two; fewer if the model has fewer stages."""
    return max(1, min(2, (os.cpu_count() or 1) // replicas))


def count_stages(
    graph: Graph, workers: int | None, given: Cut | None, rule: str, default: int | None = None
) -> tuple[int, str]:
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
    if workers is not None and workers < 1:
        raise PlanError("workers", got=str(workers), expected="at least 1", remedy="Give --workers 1 or more.")
    each = schedule_named(rule_named(rule).schedule).stages_per_worker
    if given is None:
        return _stages_for_workers(len(boundaries_of(graph)) - 1, workers, each, rule, default or default_workers())
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


def cut(captured: Captured, draft: Plan, request: str, num_stages: int, sample: Callable[[], Batch]) -> Cut:
    """Choose the stages.

    Args:
        captured: the model.
        draft: the plan without stages.
        request: one of :data:`WAYS`.
        num_stages: D.
        sample: returns a micro-batch of the size that will be trained on; called only to measure.

    Raises:
        CaptureError: the model cannot be cut into so many stages.
        UserCodeError: the model or the loss raised while it was measured.
    """
    graph = captured.graph
    if request == EQUAL or num_stages == 1:
        ends = names_of(graph, equal_cuts(graph, num_stages))
        return _as_stages(ends, ("cuts: as equal numbers of operations as can be",) if num_stages > 1 else ())
    equal = equal_cuts(graph, num_stages)  # raises for too many stages, before anything is measured
    terms = CostParameters(
        again=recomputed_ranges(graph, draft),
        micro_batches=draft.batch_parts,
        latency_s=draft.latency_s,
        bytes_per_s=draft.bytes_per_s,
    )
    if request == MEASURED:
        profile, how = profiled(captured, sample())
    else:
        profile = roofline(graph, sample_micro_batches(graph, terms.micro_batches))
        how = "predicted with fixed constants (roofline)"
    costs = stage_costs(graph, profile, terms)
    chosen = choose_cuts(costs, num_stages)
    return _as_stages(names_of(graph, chosen), (f"cuts: {how}", *_predictions(costs, chosen, equal)))


def _as_stages(ends: Sequence[str], reasons: tuple[str, ...]) -> Cut:
    return Cut(tuple((end,) for end in ends), reasons)


def _predictions(costs: StageCosts, chosen: Cuts, equal: Cuts) -> Iterator[str]:
    """Yield the predicted times of the chosen cuts, and of equal ones."""
    times = [costs.stage_s(start, stop) for start, stop in pairwise(chosen)]
    for k, (start, stop) in enumerate(pairwise(chosen)):
        compute, talk = costs.compute_s(start, stop) * 1e3, costs.communication_s(start, stop) * 1e3
        slowest = ", the slowest" if times[k] == max(times) else ""
        yield f"stage {k}: {compute:.3f} ms of computing and {talk:.3f} ms of messages per micro-batch{slowest}"
    slow = costs.slowest_s(equal)
    yield f"cut into equal numbers of operations: {slow * 1e3:.3f} ms, {slow / max(times):.2f} times the slowest"
    yield "no slowest stage is more than 2 % faster; `--cuts roofline`, `--cuts equal`, `--cuts NAME,...` override it"


def profiled(captured: Captured, micro_batch: Batch) -> tuple[Profile, str]:
    """Return a profile of every operation on one micro-batch, cached or new, and its origin in words.

    Raises:
        UserCodeError: the model or the loss raised.
    """
    with user_code("measuring the operations on the first micro-batch"):
        values = captured.values(micro_batch)
        key = {
            "model": captured.graph.fingerprint,
            "tensors": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in values.items()},
            "precision": captured.precision,
            "torch": torch.__version__,
            "threads": 1,
            "malloc": malloc_settings(),
            **machine(),
        }
        folder, length = cache_folder(), len(captured.graph.ops) + 1
        path = None if folder is None else place(folder, key)
        cached = None if path is None else kept(path, key, length)
        if cached is not None:
            return cached, f"measured on this machine at an earlier plan ({path})"
        profile = in_child(lambda: measure_operations(captured, micro_batch), "measuring the operations", Profile)
    if path is not None and keep(path, key, profile):
        return profile, f"measured on this machine now, and kept for the next plan ({path})"
    why = "nothing is to be kept" if path is None else f"{path} cannot be written"
    return profile, f"measured on this machine now; {why}, so the next plan may be cut elsewhere"
