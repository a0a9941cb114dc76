"""Cut a graph into D stages so that the slowest one is as fast as possible.

With prefix sums of the operations' seconds, ``best[d][j]`` is the smallest slowest stage of the first j pieces in d
stages (a piece is what lies between two neighbouring legal cuts); the exact dynamic programme over it takes
O(D·C·log C) for C legal cuts, since the best last cut moves only to the right. Among equally good cuts the one with the
fewest bytes across it wins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from roundelay.cost.compute import seconds
from roundelay.errors import CaptureError
from roundelay.ir.graph import Graph

_TIE = 0.02
"""Cuts whose slowest stage is within this share of the best are equally good."""


def choose_cuts(graph: Graph, num_stages: int) -> tuple[str, ...]:
    """Names of the operations that end each stage, the graph's last operation included.

    Args:
        graph: the logical graph.
        num_stages: D.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    places = graph.cuts
    if len(places) < num_stages - 1:
        raise CaptureError(
            f"a cut into {num_stages} stages",
            got=f"a model of {len(places) + 1} pieces: {len(graph.ops)} operations, {len(places)} places to cut",
            expected=f"at least {num_stages} pieces",
            remedy=f"Use at most {len(places) + 1} workers, or a deeper model.",
        )
    ends = (*places, len(graph.ops) - 1)
    total = [0.0]
    for op in graph.ops:
        total.append(total[-1] + seconds(graph, op))
    times = [total[end + 1] for end in ends]
    chosen = _balance(times, num_stages, [crossing_bytes(graph, end) for end in ends])
    return tuple(graph.ops[ends[i]].name for i in chosen)


def crossing_bytes(graph: Graph, cut: int) -> int:
    """Bytes of the values that are made up to operation ``cut`` and read after it, inputs and batch left out."""
    made = {op.name for op in graph.ops[: cut + 1]}
    read = {name for op in graph.ops[cut + 1 :] for name in op.reads} | set(graph.outputs)
    return sum(graph.values[name].num_bytes for name in made & read)


def _balance(times: Sequence[float], num_stages: int, crossing: Sequence[int]) -> list[int]:
    """Indices of the stage ends: minimal slowest stage, then fewest bytes across the cuts."""
    limit = _slowest(times, num_stages) * (1.0 + _TIE)
    n = len(times)
    worst = [0.0, *times]
    best: list[dict[int, tuple[int, int]]] = [{0: (0, -1)}]
    for d in range(1, num_stages + 1):
        layer: dict[int, tuple[int, int]] = {}
        for j in range(d, n + 1):
            if (j < n) == (d == num_stages):
                continue
            low = bisect_left(worst, worst[j] - limit - 1e-12)
            options = [(best[d - 1][i][0], i) for i in range(low, j) if i in best[d - 1]]
            if options:
                cost, i = min(options)
                layer[j] = (cost + crossing[j - 1], i)
        best.append(layer)
    ends = []
    j = n
    for d in range(num_stages, 0, -1):
        ends.append(j - 1)
        j = best[d][j][1]
    return ends[::-1]


def _slowest(times: Sequence[float], num_stages: int) -> float:
    """The smallest possible slowest stage, by bisection over the candidates' greedy feasibility."""
    low, high = 0.0, times[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(times, num_stages, middle) else (middle, high)
    return high


def _fits(times: Sequence[float], num_stages: int, limit: float) -> bool:
    """Whether stages of at most ``limit`` seconds suffice, leaving at least one piece for each."""
    start, at = 0.0, -1
    for left in range(num_stages, 0, -1):
        last = len(times) - left
        while at < last and times[at + 1] - start <= limit:
            at += 1
        if at < 0 or times[at] <= start:
            return False
        start = times[at]
    return at == len(times) - 1


def slots(source: int, target: int) -> int:
    """Slots of an edge: a message for each stage that it passes over, one being read and one arriving."""
    return target - source + 1
