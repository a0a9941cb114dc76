"""Cut a graph into D stages so that the slowest one, messages included, is as fast as possible.

A piece is what lies between two neighbouring boundaries, that is, legal cuts. Since the cost of a stage depends only on
its own two ends (:mod:`roundelay.planner.cost_model`), dynamic programming is exact: ``best[d][j]``, the smallest
possible time of the slowest of d stages that cover the first j pieces, is the minimum over i of
``max(best[d - 1][i], stage_s(i, j))``. That is O(D·C²) pairs for C legal cuts, fewer in practice: stages whose
computation alone is slower than a cut that is already known are skipped.

Cuts whose slowest stage is within 2 % of the best are considered equally good, as costs are no better known than that.
Among them, a second programme over the same pairs takes the one with the fewest bytes over all edges, then the fastest,
then the one whose last cut comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.errors import CaptureError
from roundelay.ir.graph import Graph
from roundelay.planner.cost_model import Cuts, StageCosts, boundaries_of

TIE = 0.02
"""Cuts whose slowest stage is within this share of the best are equally good."""

_StagesByEnd = list[list[tuple[int, float]]]
"""For every boundary j, by index: (i, seconds) of the candidate stages from boundary i to j."""


def choose_cuts(costs: StageCosts, num_stages: int) -> Cuts:
    """Return the cuts with the fastest slowest stage.

    Args:
        costs: costs of all stages.
        num_stages: D.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    known = costs.slowest_s(nearest_cuts(costs.boundaries, costs.work, num_stages))
    stages = _stages_by_end(costs, num_stages, known * (1.0 + TIE))
    limit = _slowest_s(stages, num_stages) * (1.0 + TIE)
    return _fewest_bytes(costs, stages, num_stages, limit)


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


def _fewest_bytes(costs: StageCosts, stages: _StagesByEnd, num_stages: int, limit: float) -> Cuts:
    """Return the cuts with the fewest bytes, then the fastest, among those whose slowest stage is within ``limit``."""
    at, none = costs.boundaries, (float("inf"), 0.0, 0)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [none] * (len(stages) - 1)
    back: list[list[int]] = []
    for _ in range(num_stages):
        best = [
            min(
                (
                    (best[i][0] + costs.bytes_in(at[i], at[j]), max(best[i][1], seconds), i)
                    for i, seconds in ending
                    if seconds <= limit
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
