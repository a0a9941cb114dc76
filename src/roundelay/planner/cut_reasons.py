"""Why a graph was cut where it was: times, FLOPs and bytes of the stages, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from roundelay.ir.graph import Graph
from roundelay.ir.num_bytes import bytes_text
from roundelay.planner.cost_model import ALIKE, Cuts, Seat, StageCosts
from roundelay.planner.kept_bytes import KeptBytes, staggered_bytes
from roundelay.planner.partition_dp import SLOWER, equal_cuts, flops_cuts

OWN_PACE = (
    "workers of this layout go at their own pace: they keep to equal steps only as far as stages take equal times"
)

AT_ONCE = "by this rule, however, micro-batches are not staggered"


def fastest(graph: Graph, costs: StageCosts, chosen: Cuts, seats: Sequence[Seat]) -> Iterator[str]:
    """Yield the predicted times of the fastest cuts in these seats, and of equal ones."""
    yield from _times(costs, chosen, seats)
    slow = costs.slowest_s(equal_cuts(graph, len(chosen) - 1), seats)
    times = slow / costs.slowest_s(chosen, seats)
    yield f"cut into equal numbers of operations: {slow * 1e3:.3f} ms, {times:.2f} times the slowest"
    yield "no slowest stage is more than 2 % faster; `--cuts roofline`, `--cuts equal`, `--cuts NAME,...` override it"


def _times(costs: StageCosts, chosen: Cuts, seats: Sequence[Seat] = ()) -> Iterator[str]:
    pairs = [*zip(pairwise(chosen), seats or [ALIKE] * (len(chosen) - 1), strict=True)]
    seconds = [costs.stage_s(*ends, seat) for ends, seat in pairs]
    for k, (ends, (speed, away)) in enumerate(pairs):
        compute, talk = costs.compute_s(*ends) / speed * 1e3, costs.communication_s(*ends, away) * 1e3
        slowest = ", the slowest" if seconds[k] == max(seconds) else ""
        yield f"stage {k}: {compute:.3f} ms of computing and {talk:.3f} ms of messages per micro-batch{slowest}"


def equal_flops(graph: Graph, chosen: Cuts) -> Iterator[str]:
    """Yield the FLOPs of each stage's forward on the sample."""
    yield "cuts: as equal FLOPs as can be; an operation without any counts with its layer"
    flops = [sum(op.flops for op in graph.ops[start:stop]) for start, stop in pairwise(chosen)]
    for k, own in enumerate(flops):
        yield f"stage {k}: {own:.3g} FLOPs, {own / max(1, sum(flops)):.1%} of a forward"


def fewest_bytes(graph: Graph, costs: StageCosts, kept: KeptBytes, chosen: Cuts, micro_batches: int) -> Iterator[str]:
    """Yield times and bytes of the cuts for which staggered micro-batches keep least, and the bytes of other cuts."""
    for (start, stop), times in zip(pairwise(chosen), _times(costs, chosen), strict=True):
        yield f"{times}; keeps {bytes_text(kept.of_stage(start, stop))}"
    num_stages, peak = len(chosen) - 1, most_at_one_time(kept, chosen, micro_batches)
    others = {"equal": equal_cuts(graph, num_stages), "flops": flops_cuts(graph, num_stages)}
    beside = [f"{bytes_text(most_at_one_time(kept, cuts, micro_batches))} with {way}" for way, cuts in others.items()]
    yield (
        f"{micro_batches} micro-batches, staggered by equal steps, keep {bytes_text(peak)} of activations at one time, "
        f"{peak / (micro_batches * kept.whole):.1%} of what they keep together; {', '.join(beside)}"
    )
    yield f"no cuts whose slowest stage is at most {SLOWER:.0%} slower keep less; `--cuts measured` is the fastest"


def most_at_one_time(kept: KeptBytes, cuts: Cuts, micro_batches: int) -> int:
    """Bytes that staggered micro-batches keep at one time, at most."""
    return max(staggered_bytes([kept.of_stage(start, stop) for start, stop in pairwise(cuts)], micro_batches))
