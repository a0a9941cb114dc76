"""Choose the cuts: measured, predicted, in equal parts, for little memory, or given by the user; with the reasons."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph, Profile
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.lower.reading import read
from roundelay.planner import cut_reasons
from roundelay.planner.choose_recompute import recomputed_positions
from roundelay.planner.cost_model import CostParameters, StageCosts, roofline, stage_costs
from roundelay.planner.kept_bytes import kept_bytes
from roundelay.planner.partition_dp import (
    Seats,
    StagePrice,
    best_cuts,
    equal_cuts,
    flops_cuts,
    names_of,
    staggered_cuts,
)
from roundelay.planner.plan_options import CutRequest
from roundelay.planner.source import Source

MEASURED, ROOFLINE, EQUAL, FLOPS, MEMORY_TIME = WAYS = ("measured", "roofline", "equal", "flops", "memory-time")
"""How cuts are chosen: by a profile of this machine, by fixed constants, by numbers of operations or of their FLOPs, or
for the fewest activations that staggered micro-batches keep at one time, by a profile and a count of what is kept."""

_GIVEN = ("cuts: as given",)

Stages = tuple[tuple[str, ...], ...]
"""For each stage, the operations that end its segments."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The chosen stages.

    Args:
        stages: for each stage, the operations that end its segments.
        reasons: the reasons, in words.
        kinds: for each stage the number of the kind of its holders, where these were chosen too.
    """

    stages: Stages
    reasons: tuple[str, ...]
    kinds: tuple[int, ...] = ()


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


def cut(source: Source, draft: Plan, request: str, num_stages: int, seats: Seats | None = None) -> Cut:
    """Choose the stages, and what holds them where that differs.

    Args:
        source: of the model in the plan's precision.
        draft: the plan without stages.
        request: one of :data:`WAYS`.
        num_stages: D.
        seats: what may hold them, if it was declared; it counts where the fastest stages are looked for.

    Raises:
        CaptureError: the model cannot be cut into so many stages.
        UserCodeError: the model or the loss raised while it was measured.
    """
    graph = source.graph
    equal = equal_cuts(graph, num_stages)  # raises for too many stages, before anything is measured
    if request == EQUAL or (num_stages == 1 and seats is None):
        reason = "cuts: as equal numbers of operations as can be"
        return _as_stages(names_of(graph, equal), (reason,) if num_stages > 1 else ())
    if request == FLOPS:
        by_flops = flops_cuts(graph, num_stages)
        return _as_stages(names_of(graph, by_flops), tuple(cut_reasons.equal_flops(graph, by_flops)))
    apart = not _on_one_worker(draft)
    terms = CostParameters(
        again=recomputed_positions(graph, draft),
        micro_batches=draft.batch_parts,
        latency_s=draft.latency_s if apart else 0.0,
        bytes_per_s=draft.bytes_per_s if apart else math.inf,
        between=None if seats is None else seats.between,
    )
    if request == ROOFLINE:
        predicted = roofline(graph, sample_micro_batches(graph, terms.micro_batches))
        return _fastest(
            source, draft, (predicted, "predicted with fixed constants (roofline)"), terms, num_stages, seats
        )
    profile, how = source.profile(draft)
    if request == MEASURED:
        return _fastest(source, draft, (profile, how), terms, num_stages, seats)
    return _fewest_bytes(source, draft, stage_costs(graph, profile, terms), num_stages, how)


def _on_one_worker(draft: Plan) -> bool:
    """Whether a micro-batch stays on one worker, so that nothing is sent from stage to stage."""
    form = read(draft).form
    return form is not None and not form.stages_per_worker


def _fastest(
    source: Source, draft: Plan, by: tuple[Profile, str], terms: CostParameters, num_stages: int, seats: Seats | None
) -> Cut:
    graph, (profile, how) = source.graph, by

    def made() -> Cut:
        costs, own = stage_costs(graph, profile, terms), seats
        # of what is divided among holders, and of several stages on one, it is known when they are priced
        limited = seats is not None and any(kind.memory < math.inf for kind in seats.kinds)
        alternate = read(draft).schedule.stages_per_worker != 1
        if seats and limited and not (alternate or draft.states or draft.mesh_size > 1):
            own = replace(seats, held=held_by_stage(source, draft, costs, num_stages))
        chosen, kinds = best_cuts(costs, num_stages, own)
        reasons = cut_reasons.fastest(graph, costs, chosen, seats.of_stages(kinds) if seats else ())
        return replace(_as_stages(names_of(graph, chosen), (f"cuts: {how}", *reasons)), kinds=kinds)

    key = draft.rule, draft.micro_batches, draft.mesh_size, bool(draft.states)
    return source.memo.of(("fastest", profile, terms, num_stages, how, seats, seats and key), made)


def held_by_stage(source: Source, draft: Plan, costs: StageCosts, num_stages: int) -> StagePrice:
    """Bytes that a stage's holder has of it: weights, gradients, optimizer states, tapes in flight, messages.

    A weight is the first stage's that reads it. Versions of weights are counted to within one.
    """
    graph, schedule, size = source.graph, read(draft).schedule, draft.micro_batches
    kept = kept_bytes(graph, source.storages(draft), shared=False, again=costs.parameters.again)
    first = {name: i for i, op in reversed([*enumerate(graph.ops)]) for name in op.parameters}
    states = source.state_bytes or {}
    owned, weights = [0] * (len(graph.ops) + 2), [0] * (len(graph.ops) + 2)
    for name, i in first.items():
        weights[i + 1] += graph.parameters[name].num_bytes
        copies = 2 + (draft.replicas > 1)  # gradients of another replica arrive beside one's own
        owned[i + 1] += copies * graph.parameters[name].num_bytes + states.get(name, 0)
    up_to, weights_up_to = [*accumulate(owned)], [*accumulate(weights)]
    tapes = [schedule.body((k,), num_stages, size).peak(schedule.window, size, "F", "B") for k in range(num_stages)]
    if schedule.free:  # and one more, but on the last stage
        tapes = [*range(num_stages + 1, 2, -1), 1]

    older = [older_versions(draft, stage, num_stages, tapes[stage]) for stage in range(num_stages)]

    def held(stage: int, start: int, stop: int) -> int:
        again = older[stage] * (weights_up_to[stop] - weights_up_to[start])
        messages = (costs.bytes_in(start, stop) + costs.bytes_out(start, stop)) // costs.sample_micro_batches
        return up_to[stop] - up_to[start] + again + tapes[stage] * kept.of_stage(start, stop) + messages

    return held


def older_versions(draft: Plan, stage: int, num_stages: int, in_flight: int) -> int:
    """Versions of a stage's weights beside the newest: those that forwards in flight have read, and a predicted one.

    Args:
        draft: whose rule it is.
        stage: its number.
        num_stages: D.
        in_flight: forwards of the stage without their backward at one time.
    """
    rule, schedule = rule_named(draft.rule), read(draft).schedule
    if schedule.window == "batch" and not schedule.free:
        return 0
    predicted = int(rule.predicts and (stage < num_stages - 1 or rule.target != "backward"))
    if rule.versions == "table":
        return 1
    if rule.backward_reads(draft.backward) != "forward":
        return predicted
    ahead = num_stages - 1 if rule.versions == "entry" else in_flight - 1
    return -(-ahead // draft.micro_batches) + predicted


def _fewest_bytes(source: Source, draft: Plan, costs: StageCosts, num_stages: int, how: str) -> Cut:
    """Cut for the fewest activations at one time, of the micro-batches of a batch, or of a pipeline's stages."""
    graph, form = source.graph, read(draft).form
    kept = kept_bytes(graph, source.storages(draft), shared=_on_one_worker(draft), again=costs.parameters.again)
    size = num_stages if form is None else draft.batch_parts  # as a full pipeline is staggered
    chosen = staggered_cuts(costs, kept, num_stages, size)
    reasons = [f"cuts: {how}", *cut_reasons.fewest_bytes(graph, costs, kept, chosen, size)]
    if form is not None and (form.replicates or not form.staggered):
        reasons.append(cut_reasons.OWN_PACE if form.staggered else cut_reasons.AT_ONCE)
    return _as_stages(names_of(graph, chosen), tuple(reasons))


def _as_stages(ends: Sequence[str], reasons: tuple[str, ...]) -> Cut:
    return Cut(tuple((end,) for end in ends), reasons)
