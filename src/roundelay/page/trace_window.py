"""Read a window in the middle of a trace, line by line: the trace of a long run may not fit into memory."""

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

_TIMES = re.compile(r'"ts":(-?[\d.]+),"dur":([\d.]+)')
_FIRST = re.compile(r'"cat":"forward","pid":0,.*"stage":0,')
_MICRO = 1e6


def window_length(micro_batches: int) -> int:
    """Number of micro-batches in a window: one and a half batches, within limits."""
    return min(MOST, max(LEAST, micro_batches * 3 // 2))


def read_window(path: Path, num_workers: int, micro_batches: int) -> Window | None:
    """A window of the steady state, or None if the trace is empty.

    Args:
        path: a trace as `write_trace` writes it, one event per line.
        num_workers: D.
        micro_batches: M.

    Raises:
        UsageError: it is not such a trace.
    """
    try:
        starts = _forward_starts(path)
        if not starts:
            return None
        begin, end = _interval(starts, window_length(micro_batches))
        events = _between(path, begin, end)
        spans = [_span(event) for event in events if event["cat"] not in ("idle", "load")]
        gaps = [_gap(event) for event in events if event["cat"] == "idle"]
        loads = [_load(event) for event in events if event["cat"] == "load"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"trace {path}",
            got=f"{type(error).__name__}: {error}",
            expected="a trace as `roundelay train` writes it",
            remedy="Move the file away; the report can be written without it.",
        ) from error
    known = [span for span in spans if span.worker < num_workers]
    return Window(begin / _MICRO, end / _MICRO, known, gaps, num_workers, loads)


def _forward_starts(path: Path) -> list[float]:
    """Start times of stage 0's forwards, in microseconds, sorted."""
    starts = []
    with path.open(encoding="utf-8") as file:
        if not file.readline().startswith('{"displayTimeUnit"'):
            raise ValueError("another first line")
        for line in file:
            if _FIRST.search(line) and (times := _TIMES.search(line)):
                starts.append(float(times[1]))
    return sorted(starts)


def _interval(starts: list[float], count: int) -> tuple[float, float]:
    """Begin and end, in microseconds, of ``count`` micro-batches in the middle of the run."""
    first = max(0, (len(starts) - count) // 2)
    last = min(len(starts) - 1, first + count)
    period = (starts[last] - starts[first]) / (last - first) if last > first else _MICRO
    ends = starts[last] if last - first == count else starts[last] + 3 * period
    return starts[first], max(ends, starts[first] + 1.0)


def _between(path: Path, begin: float, end: float) -> list[dict[str, Any]]:
    """The complete events (``"ph": "X"``) that overlap an interval, in microseconds."""
    events = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            times = _TIMES.search(line) if line.startswith('{"ph":"X"') else None
            if times and float(times[1]) < end and float(times[1]) + float(times[2]) > begin:
                events.append(json.loads(line.rstrip().rstrip(",")))
    return events


def _span(event: dict[str, Any]) -> Span:
    args, start = event["args"], float(event["ts"]) / _MICRO
    end, names = start + float(event["dur"]) / _MICRO, ("micro-batch", "batch", "version", "distance", "bytes", "stage")
    g, batch, version, distance, sent, stage = (int(args[name]) for name in names)
    of = str(args.get("of", ""))
    return Span(int(event["pid"]), str(event["cat"]), g, batch, version, distance, start, end, sent, stage, of)


def _load(event: dict[str, Any]) -> Load:
    start = float(event["ts"]) / _MICRO
    return Load(int(event["pid"]), int(event["args"]["batch"]), start, start + float(event["dur"]) / _MICRO)


def _gap(event: dict[str, Any]) -> Gap:
    start = float(event["ts"]) / _MICRO
    return Gap(int(event["pid"]), event["name"], start, start + float(event["dur"]) / _MICRO)
