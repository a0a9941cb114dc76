"""Cut a graph into D stages so that the slowest one, with what it sends and receives, is as fast as possible.

A piece is what lies between two neighbouring boundaries, that is, legal cuts. Since the price of a stage depends on its
own two ends alone (:mod:`roundelay.planner.cost_model`), a dynamic programme is exact: ``best[d][j]``, the smallest
slowest stage of the first j pieces in d stages, is the least over i of ``max(best[d - 1][i], price(i, j))``. It looks
at O(D·C²) pairs for C legal cuts, fewer in practice: what a known cut shows to be too slow by its computing alone is
left out.

Cuts whose slowest stage is within 2 % of the best are equally good, as prices are no better known than that. Among
them the one with the fewest bytes over all edges wins, then the faster, then the one whose last cut comes first: a
second programme over the same pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.errors import CaptureError
from roundelay.ir.graph import Graph
from roundelay.planner.cost_model import Cuts, StageCosts, boundaries_of

TIE = 0.02
"""Cuts whose slowest stage is within this share of the best are equally good."""

_Rows = list[list[tuple[int, float]]]
"""For every boundary j, by index: the boundaries i at which a stage up to j may begin, and its price."""


def choose_cuts(prices: StageCosts, num_stages: int) -> Cuts:
    """The cuts with the fastest slowest stage.

    Args:
        prices: of all stages.
        num_stages: D.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    known = prices.slowest_s(nearest_cuts(prices.boundaries, prices.work, num_stages))
    rows = _rows(prices, num_stages, known * (1.0 + TIE))
    limit = _slowest(rows, num_stages) * (1.0 + TIE)
    return _leanest(prices, rows, num_stages, limit)


def equal_cuts(graph: Graph, num_stages: int) -> Cuts:
    """The cuts nearest to equal numbers of operations in every stage.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    end = len(graph.ops) + 1
    return nearest_cuts(boundaries_of(graph), (*map(float, range(end)), end - 1.0), num_stages)


def nearest_cuts(boundaries: Sequence[int], amount: Sequence[float], num_stages: int) -> Cuts:
    """The cuts nearest to equal shares of a growing amount, from the left, at least one piece in each stage.

    Args:
        boundaries: where it may be cut.
        amount: at each number from 0 to n + 1, how much lies before it.
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
        wanted = amount[boundaries[-1]] * k / num_stages
        free = range(chosen[-1] + 1, pieces - (num_stages - k) + 1)
        chosen.append(min(free, key=lambda i: abs(amount[boundaries[i]] - wanted)))
    return (*(boundaries[i] for i in chosen), boundaries[-1])


def names_of(graph: Graph, cuts: Cuts) -> tuple[str, ...]:
    """Names of the operations that end each stage, the graph's last operation included."""
    return tuple(graph.ops[min(stop, len(graph.ops)) - 1].name for stop in cuts[1:])


def _rows(prices: StageCosts, num_stages: int, bound: float) -> _Rows:
    """All stages that compute no longer than ``bound``, between boundaries at which some cut within it may lie."""
    at = prices.boundaries
    places = _places(prices, num_stages, bound)
    rows: _Rows = [[] for _ in at]
    for n, j in enumerate(places):
        for i in reversed(places[:n]):
            if prices.compute_s(at[i], at[j]) > bound:
                break
            price = prices.stage_s(at[i], at[j])
            if price <= bound:
                rows[j].append((i, price))
    return rows


def _places(prices: StageCosts, num_stages: int, bound: float) -> list[int]:
    """Boundaries, by index, before which k stages can compute all there is and behind which the others can."""
    work, last, most = prices.work, len(prices.boundaries) - 1, bound * (1.0 + 1e-9)
    done = [work[boundary] for boundary in prices.boundaries]
    inner = [
        i
        for i in range(1, last)
        if any(done[last] - (num_stages - k) * most <= done[i] <= k * most for k in range(1, num_stages))
    ]
    return [0, *inner, last]


def _slowest(rows: _Rows, num_stages: int) -> float:
    """The smallest possible slowest stage."""
    best = [0.0] + [float("inf")] * (len(rows) - 1)
    for _ in range(num_stages):
        best = [min((max(best[i], price) for i, price in row), default=float("inf")) for row in rows]
    return best[-1]


def _leanest(prices: StageCosts, rows: _Rows, num_stages: int, limit: float) -> Cuts:
    """Fewest bytes, then the fastest slowest stage, among cuts whose slowest stage is within the limit."""
    at, none = prices.boundaries, (float("inf"), 0.0, 0)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [none] * (len(rows) - 1)
    back: list[list[int]] = []
    for _ in range(num_stages):
        best = [
            min(
                (
                    (best[i][0] + prices.bytes_in(at[i], at[j]), max(best[i][1], price), i)
                    for i, price in row
                    if price <= limit
                ),
                default=none,
            )
            for j, row in enumerate(rows)
        ]
        back.append([i for _, _, i in best])
    chosen = [len(rows) - 1]
    for layer in reversed(back):
        chosen.append(layer[chosen[-1]])
    return tuple(at[i] for i in reversed(chosen))


def slots(source: int, target: int) -> int:
    """Slots of an edge: a message for each stage that it passes over, one being read and one arriving."""
    return target - source + 1
