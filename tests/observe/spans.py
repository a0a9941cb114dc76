"""Spans of runs that are written by hand."""

from __future__ import annotations

from roundelay.observe.trace import Span


def span(worker: int, opcode: str, g: int, start: float, end: float, **channels: tuple[int, ...]) -> Span:
    """What a worker did on its one stage; its other numbers do not matter."""
    return Span(worker, opcode, g, g, 0, 0, start, end, 0, worker, **channels)
