"""A window of a trace in the middle of the run, read line by line: a long run's trace would not fit into memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from roundelay.errors import UsageError
from roundelay.ir.micro_batch import Load
from roundelay.observe.trace import Gap, Span
from roundelay.page.timeline import Window

LEAST, MOST = 12, 36
"""Fewest and most micro-batches in a window."""

_WHEN = re.compile(r'"ts":(-?[\d.]+),"dur":([\d.]+)')
_FIRST = re.compile(r'"cat":"forward","pid":0,.*"stage":0,')
_MICRO = 1e6


def shown(micro_batches: int) -> int:
    """Micro-batches in a window: a batch and a half, within limits."""
    return min(MOST, max(LEAST, micro_batches * 3 // 2))


def read_window(path: Path, num_workers: int, micro_batches: int) -> Window | None:
    """A stretch of the steady state; None if nothing ran.

    Args:
        path: a trace as `write_trace` makes it, one event on a line.
        num_workers: D.
        micro_batches: M.

    Raises:
        UsageError: it is no such trace.
    """
    try:
        starts = _forwards(path)
        if not starts:
            return None
        begin, end = _stretch(starts, shown(micro_batches))
        events = _between(path, begin, end)
        spans = [_span(event) for event in events if event["cat"] not in ("idle", "load")]
        gaps = [_gap(event) for event in events if event["cat"] == "idle"]
        loads = [_load(event) for event in events if event["cat"] == "load"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"trace {path}",
            got=f"{type(error).__name__}: {error}",
            expected="a trace as `roundelay train` writes it",
            remedy="Move the file away; the report does without it.",
        ) from error
    ours = [span for span in spans if span.worker < num_workers]
    return Window(begin / _MICRO, end / _MICRO, ours, gaps, num_workers, loads)


def _forwards(path: Path) -> list[float]:
    """When stage 0's forwards began, in microseconds."""
    found = []
    with path.open(encoding="utf-8") as file:
        if not file.readline().startswith('{"displayTimeUnit"'):
            raise ValueError("another first line")
        for line in file:
            if _FIRST.search(line) and (when := _WHEN.search(line)):
                found.append(float(when[1]))
    return sorted(found)


def _stretch(starts: list[float], count: int) -> tuple[float, float]:
    """Begin and end of a window of so many micro-batches around the middle of the run, in microseconds."""
    first = max(0, (len(starts) - count) // 2)
    last = min(len(starts) - 1, first + count)
    period = (starts[last] - starts[first]) / (last - first) if last > first else _MICRO
    ends = starts[last] if last - first == count else starts[last] + 3 * period
    return starts[first], max(ends, starts[first] + 1.0)


def _between(path: Path, begin: float, end: float) -> list[dict[str, Any]]:
    """The complete events that overlap a stretch."""
    found = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            when = _WHEN.search(line) if line.startswith('{"ph":"X"') else None
            if when and float(when[1]) < end and float(when[1]) + float(when[2]) > begin:
                found.append(json.loads(line.rstrip().rstrip(",")))
    return found


def _span(event: dict[str, Any]) -> Span:
    args, start = event["args"], float(event["ts"]) / _MICRO
    numbers = (int(args[name]) for name in ("micro-batch", "batch", "version", "distance"))
    g, batch, version, distance = numbers
    end, sent = start + float(event["dur"]) / _MICRO, int(args["bytes"])
    stage = int(args["stage"])
    return Span(int(event["pid"]), str(event["cat"]), g, batch, version, distance, start, end, sent, stage)


def _load(event: dict[str, Any]) -> Load:
    start = float(event["ts"]) / _MICRO
    return Load(int(event["pid"]), int(event["args"]["batch"]), start, start + float(event["dur"]) / _MICRO)


def _gap(event: dict[str, Any]) -> Gap:
    start = float(event["ts"]) / _MICRO
    return Gap(int(event["pid"]), event["name"], start, start + float(event["dur"]) / _MICRO)
