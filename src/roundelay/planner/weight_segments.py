"""Segments whose weights or gradients are exchanged one after the other: where a stage that holds parts of them is cut.

While a segment runs, all of its weights or gradients are there; so they should be few. A segment costs some 100
microseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from roundelay.ir.graph import Graph

SHARE, LEAST = 16, 64 << 10
"""A segment has at least this part of its stage's weights, and at least so many bytes, where it can be cut so."""


def in_segments(graph: Graph, stages: Sequence[Sequence[str]], parts: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The ends of every stage's segments, with one wherever enough weights have been used.

    Args:
        graph: of the model.
        stages: for each stage the operations that end its segments.
        parts: names of the parameters of which a holder has parts.
    """
    numbers = {op.name: i for i, op in enumerate(graph.ops)}
    legal, start = set(graph.cuts), 0
    result: list[tuple[str, ...]] = []
    for ends in stages:
        stop = numbers[ends[-1]] + 1
        ops = graph.ops[start:stop]
        total = sum(_bytes(graph, op.parameters, parts) for op in ops)
        least, used, found = max(LEAST, total / SHARE), 0, []
        for i, op in enumerate(ops, start):
            used += _bytes(graph, op.parameters, parts)
            if op.name in ends or (used >= least and i in legal):
                found.append(op.name)
                used = 0
        result.append(tuple(found))
        start = stop
    return tuple(result)


def _bytes(graph: Graph, names: Sequence[str], parts: Collection[str]) -> int:
    return sum(graph.parameters[name].num_bytes for name in names if name in parts)
