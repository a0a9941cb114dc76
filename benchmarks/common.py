"""What every benchmark shares: who measures, on what, how busy it was, and a table that can be pasted.

A benchmark alternates its candidates in one job, so that a busy moment meets all of them, and quotes medians with the
smallest and the largest value. It refuses to begin on a busy machine; ``--anyway`` begins all the same, and the table
says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

BUSY = 0.7
"""A load average of the last minute above this share of one core is a busy machine."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for: the short form, how many repeats, where the numbers go."""

    short: bool
    repeats: int
    out: Path | None
    load: float


def asked(description: str, repeats: int) -> Asked:
    """Parse the command line, and refuse a busy machine."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true", help="the form that `make bench` runs")
    parser.add_argument("--repeats", type=int, default=0, help=f"default: {repeats}, or 2 in the short form")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--out", type=Path, help="write every single number there, as JSON")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    if load > BUSY and not args.anyway:
        sys.exit(f"The machine is busy (load {load:.2f} in the last minute, more than {BUSY}). Wait, or say --anyway.")
    torch.set_num_threads(1)
    return Asked(args.short, args.repeats or (2 if args.short else repeats), args.out, load)


def alternate(candidates: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run each candidate once per round, in an order that turns; what each returned, by name."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(candidates[name]())
            if sys.stderr.isatty():
                print(f"\r\033[Kround {turn + 1} of {repeats}: {name} {found[name][-1]:.4g}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return found


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median (smallest to largest)."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of (x, y): what one more x costs, whatever beginning and end cost."""
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def report(what: Asked, text: str, numbers: Mapping[str, object]) -> None:
    """Print the table and where it comes from; write the numbers where they were asked for."""
    load = f"load {what.load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end"
    print(text)
    print(f"\n{machine()}; {load}; {what.repeats} rounds; {time.strftime('%Y-%m-%d')}")
    if what.out is not None:
        what.out.write_text(json.dumps({"machine": machine(), "load": what.load, **numbers}, indent=1))


def machine() -> str:
    """The machine in words."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, torch {torch.__version__}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
