"""Seconds of an operation from its floating-point operations and the bytes that it touches (a roofline).

The constants describe one core of an ordinary CPU. They are fixed, not measured, so that planning the same job twice
gives the same cuts and with them the same bits; only ratios between operations matter for a cut.
"""

from __future__ import annotations

from roundelay.ir.graph import Graph, Op

FLOPS_PER_S = 4e10
BYTES_PER_S = 1e10
CALL_S = 4e-6
BACKWARD_RATIO = 2.0
"""A backward computes two products for each of the forward's."""


def touched_bytes(graph: Graph, op: Op) -> int:
    """Bytes that one forward of ``op`` reads and writes, on the sample micro-batch."""
    values = sum(graph.values[name].num_bytes for name in (op.name, *op.reads))
    return values + sum(graph.parameters[name].num_bytes for name in op.parameters if op.flops)


def forward_seconds(graph: Graph, op: Op) -> float:
    """Predicted seconds of one forward of ``op`` on the sample micro-batch."""
    return CALL_S + max(op.flops / FLOPS_PER_S, touched_bytes(graph, op) / BYTES_PER_S)


def seconds(graph: Graph, op: Op) -> float:
    """Predicted seconds of one forward and one backward of ``op`` on the sample micro-batch."""
    return forward_seconds(graph, op) * (1.0 + BACKWARD_RATIO)
