"""Cut a graph into D stages so that the slowest one, messages included, is as fast as possible.

A piece is what lies between two neighbouring boundaries, that is, legal cuts. Since the cost of a stage depends only on
its own two ends (:mod:`roundelay.planner.cost_model`), dynamic programming is exact: ``best[d][j]``, the smallest
possible time of the slowest of d stages that cover the first j pieces, is the minimum over i of
``max(best[d - 1][i], stage_s(i, j))``. That is O(D·C²) pairs for C legal cuts, fewer in practice: stages whose
computation alone is slower than a cut that is already known are skipped.

Cuts whose slowest stage is within 2 % of the best are considered equally good, as costs are no better known than that.
Among them, a second programme over the same pairs takes the one with the fewest bytes over all edges, then the fastest,
then the one whose last cut comes first. :func:`staggered_cuts` allows 10 %, and takes the fewest bytes of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from roundelay.errors import CaptureError
from roundelay.ir.graph import Graph, Op
from roundelay.planner.cost_model import Cuts, StageCosts, boundaries_of
from roundelay.planner.kept_bytes import KeptBytes
from roundelay.schedules import holders_of

TIE = 0.02
"""Cuts whose slowest stage is within this share of the best are equally good."""

SLOWER = 0.1
"""By which share of the best :func:`staggered_cuts` may make the slowest stage slower."""

_Price = Callable[[int, int, int], int]
"""From the number of a stage and where it starts and stops to its price."""

_StagesByEnd = list[list[tuple[int, float]]]
"""For every boundary j, by index: (i, seconds) of the candidate stages from boundary i to j."""


def best_cuts(costs: StageCosts, num_stages: int) -> Cuts:
    """Return the cuts with the fastest slowest stage.

    Args:
        costs: costs of all stages.
        num_stages: D.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    return _cheapest(costs, num_stages, 1.0 + TIE, lambda _, start, stop: costs.bytes_in(start, stop))


def staggered_cuts(costs: StageCosts, kept: KeptBytes, num_stages: int, micro_batches: int) -> Cuts:
    """Return the cuts with the fewest bytes of activations at one time, where N micro-batches start one after another.

    Each starts 2S/N time steps after the one before, and a batch takes 2S steps (Cyclic Data Parallelism, Sect. 3.2):
    stage k, from 0, keeps a micro-batch's activations from step k to step 2S - 1 - k, so those of ceil(N (S - k) / S)
    micro-batches at most, which, if S divides N, is their number in every step. The sum over the stages is minimised.
    A step is as long as the slowest stage, which may be 10 % slower than that of the fastest cuts: else all operations
    would best be in the last stage.

    Args:
        costs: costs of all stages.
        kept: bytes of all stages.
        num_stages: S.
        micro_batches: N.

    Raises:
        CaptureError: there are fewer than S pieces.
    """
    held = [holders_of(k, num_stages, micro_batches) for k in range(num_stages)]
    return _cheapest(costs, num_stages, 1.0 + SLOWER, lambda k, start, stop: held[k] * kept.of_stage(start, stop))


def flops_cuts(graph: Graph, num_stages: int) -> Cuts:
    """Return the cuts nearest to equal FLOPs in every stage (Cyclic Data Parallelism, Sect. 5).

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    work = (*accumulate((float(op.flops) for op in graph.ops), initial=0.0), float(sum(op.flops for op in graph.ops)))
    between = _between_layers(graph)
    boundaries = between if len(between) > num_stages else boundaries_of(graph)
    return nearest_cuts(boundaries, work, num_stages)


def _between_layers(graph: Graph) -> Cuts:
    """One boundary between any two neighbouring operations that have FLOPs: the nearest to where their layers meet."""
    boundaries, between = boundaries_of(graph), [0]
    heavy = [i for i, op in enumerate(graph.ops) if op.flops]
    for first, second in pairwise(heavy):
        legal = [boundary for boundary in boundaries if first < boundary <= second]
        distances = [abs(boundary - _meeting(graph, first, second)) for boundary in legal]
        between += [legal[distances.index(min(distances))]] if legal else []
    return (*between, boundaries[-1])


def _meeting(graph: Graph, first: int, second: int) -> int:
    """Where the layers of two operations meet: at the operation with which that of the second begins.

    An operation without FLOPs, such as a bias, a norm or an activation, counts with that one of the two whose module
    has more of its path in common, and rather with the first.
    """
    ops = graph.ops
    return 1 + max(i for i in range(first, second) if _alike(ops[i], ops[first]) >= _alike(ops[i], ops[second]))


def _alike(one: Op, other: Op) -> int:
    """How many parts the paths of two operations' modules have in common, from the outermost on."""
    pairs = list(zip(one.module.split("."), other.module.split("."), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def equal_cuts(graph: Graph, num_stages: int) -> Cuts:
    """Return the cuts nearest to equal numbers of operations in every stage.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    end = len(graph.ops) + 1
    return nearest_cuts(boundaries_of(graph), (*map(float, range(end)), end - 1.0), num_stages)


def nearest_cuts(boundaries: Sequence[int], amount: Sequence[float], num_stages: int) -> Cuts:
    """Return the cuts nearest to equal parts of a cumulative amount, chosen from left to right.

    Every stage has at least one piece.

    Args:
        boundaries: where stages may begin and end.
        amount: entry i is the amount before operation i, for i from 0 to n + 1.
        num_stages: D.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    pieces = len(boundaries) - 1
    if pieces < num_stages:
        raise CaptureError(
            f"a cut into {num_stages} stages",
            got=f"a model of {pieces} pieces: {boundaries[-1] - 1} operations, {pieces - 1} places to cut",
            expected=f"at least {num_stages} pieces",
            remedy=f"Cut into at most {pieces} stages, or give a model of more operations.",
        )
    chosen = [0]
    for k in range(1, num_stages):
        ideal = amount[boundaries[-1]] * k / num_stages
        free = range(chosen[-1] + 1, pieces - (num_stages - k) + 1)
        chosen.append(min(free, key=lambda i: abs(amount[boundaries[i]] - ideal)))
    return (*(boundaries[i] for i in chosen), boundaries[-1])


def names_of(graph: Graph, cuts: Cuts) -> tuple[str, ...]:
    """Return the names of the operations that end each stage, the graph's last operation included."""
    return tuple(graph.ops[min(stop, len(graph.ops)) - 1].name for stop in cuts[1:])


def _cheapest(costs: StageCosts, num_stages: int, margin: float, price: _Price) -> Cuts:
    """Return the cuts with the lowest price among those whose slowest stage takes at most ``margin`` times the best."""
    known = costs.slowest_s(nearest_cuts(costs.boundaries, costs.work, num_stages))
    stages = _stages_by_end(costs, num_stages, known * margin)
    return _least(stages, costs.boundaries, num_stages, _slowest_s(stages, num_stages) * margin, price)


def _stages_by_end(costs: StageCosts, num_stages: int, bound: float) -> _StagesByEnd:
    """Return all stages no slower than ``bound`` between feasible boundaries."""
    at = costs.boundaries
    feasible = _feasible(costs, num_stages, bound)
    stages: _StagesByEnd = [[] for _ in at]
    for n, j in enumerate(feasible):
        for i in reversed(feasible[:n]):
            if costs.compute_s(at[i], at[j]) > bound:
                break
            seconds = costs.stage_s(at[i], at[j])
            if seconds <= bound:
                stages[j].append((i, seconds))
    return stages


def _feasible(costs: StageCosts, num_stages: int, bound: float) -> list[int]:
    """Return the indices of boundaries where some cut fits within ``bound``, counting computation only.

    For some k, all work before the boundary fits into k stages, and all work after it into the remaining ones.
    """
    work, last, most = costs.work, len(costs.boundaries) - 1, bound * (1.0 + 1e-9)
    done = [work[boundary] for boundary in costs.boundaries]
    inner = [
        i
        for i in range(1, last)
        if any(done[last] - (num_stages - k) * most <= done[i] <= k * most for k in range(1, num_stages))
    ]
    return [0, *inner, last]


def _slowest_s(stages: _StagesByEnd, num_stages: int) -> float:
    """Return the smallest possible seconds of the slowest stage."""
    best = [0.0] + [float("inf")] * (len(stages) - 1)
    for _ in range(num_stages):
        best = [min((max(best[i], seconds) for i, seconds in ending), default=float("inf")) for ending in stages]
    return best[-1]


def _least(stages: _StagesByEnd, at: Cuts, num_stages: int, limit: float, price: _Price) -> Cuts:
    """Return the cuts with the lowest price, then the fastest, among those whose slowest stage is within ``limit``."""
    none = (float("inf"), 0.0, 0)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [none] * (len(stages) - 1)
    back: list[list[int]] = []
    for k in range(num_stages):
        best = [
            min(
                (
                    (best[i][0] + price(k, at[i], at[j]), max(best[i][1], seconds), i)
                    for i, seconds in ending
                    if seconds <= limit and best[i] != none
                ),
                default=none,
            )
            for j, ending in enumerate(stages)
        ]
        back.append([i for _, _, i in best])
    chosen = [len(stages) - 1]
    for layer in reversed(back):
        chosen.append(layer[chosen[-1]])
    return tuple(at[i] for i in reversed(chosen))


def slots(source: int, target: int) -> int:
    """Return the slots of an edge: one for each stage that it skips, one being read and one arriving."""
    return target - source + 1
