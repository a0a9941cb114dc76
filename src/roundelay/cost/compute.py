"""Seconds of an operation from its floating-point operations and the bytes that it touches (a roofline).

The constants describe one core of an ordinary CPU. They are fixed, not measured, so that planning the same job gives
the same cuts on every machine; only ratios between operations matter for a cut.
"""

from __future__ import annotations

from roundelay.ir.graph import Graph, Op
from roundelay.ir.profile import Profile

FLOPS_PER_S = 4e10
BYTES_PER_S = 1e10
CALL_S = 4e-6
BACKWARD_RATIO = 2.0
"""A backward computes two products for each of the forward's."""


def touched_bytes(graph: Graph, op: Op) -> int:
    """Bytes that one forward of ``op`` reads and writes, on the sample, a whole batch."""
    values = sum(graph.values[name].num_bytes for name in (op.name, *op.reads))
    return values + sum(graph.parameters[name].num_bytes for name in op.parameters if op.flops)


def forward_seconds(graph: Graph, op: Op, micro_batches: int = 1) -> float:
    """Predicted seconds of one forward of ``op`` on one of so many micro-batches of the sample."""
    return CALL_S + max(op.flops / FLOPS_PER_S, touched_bytes(graph, op) / BYTES_PER_S) / micro_batches


def roofline(graph: Graph, micro_batches: int = 1) -> Profile:
    """The predicted profile of a graph. Loss and updates cost nothing in it.

    Args:
        graph: the logical graph.
        micro_batches: how many the sample is cut into.
    """
    forward = (*(forward_seconds(graph, op, micro_batches) for op in graph.ops), 0.0)
    return Profile(forward, tuple(BACKWARD_RATIO * seconds for seconds in forward), (0.0,) * len(forward))
