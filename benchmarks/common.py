"""What every benchmark shares: who measures, on what, how busy it was, and a table that can be pasted.

A benchmark alternates its candidates in one job, so that a busy moment meets all of them, drops the first round as a
warm-up, and quotes medians of at least five rounds with the smallest and the largest value. It refuses to begin on a
machine that others use; ``--anyway`` begins all the same, and the line below the table says so. Others are those
outside of this job: what the machine's cores were busy with, less what this process and its children have used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

BUSY = 0.1
"""A machine is busy when others use more than this share of its cores."""

LOOK_S = 2.0
"""Seconds of looking what others do. The load average alone will not do: it still tells of the benchmark before."""

REPEATS = 5
"""Fewer rounds say nothing about the spread."""


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of all cores since the machine was started (idle ones included, and without them), and our own of them.

    Zeros where there is no ``/proc/stat``.
    """

    total_s: float
    busy_s: float
    own_s: float

    @staticmethod
    def now() -> Used:
        """Until now; of our own processes those that are children are counted once they have ended."""
        lines = _lines("/proc/stat")
        ticks = [float(word) for word in lines[0].split()[1:9]] if lines else [0.0] * 8
        second = os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        idle = ticks[3] + ticks[4]  # and waiting for disks
        return Used(sum(ticks) / second, (sum(ticks) - idle) / second, sum(o.ru_utime + o.ru_stime for o in own))

    def others(self) -> float:
        """Share of all cores that others have used since."""
        now = Used.now()
        total = now.total_s - self.total_s
        busy = now.busy_s - self.busy_s - (now.own_s - self.own_s)
        return max(0.0, busy / total) if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for, and how busy the machine was before.

    Args:
        short: the form for ``make bench``.
        repeats: rounds that count.
        out: where the numbers go.
        load: load average of the last minute.
        others: share of all cores that others used at the start.
        began: when the benchmark began.
    """

    short: bool
    repeats: int
    out: Path | None
    load: float
    others: float
    began: Used


def asked(description: str, repeats: int = REPEATS) -> Asked:
    """Parse the command line, and refuse a busy machine."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--short", action="store_true", help="the form that `make bench` runs")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"rounds that count; default: {repeats}")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--out", type=Path, help="write every single number there, as JSON")
    args = parser.parse_args()
    if args.repeats < min(REPEATS, repeats):  # a benchmark of bytes says the same each time
        parser.error(f"--repeats: at least {min(REPEATS, repeats)}, as fewer say nothing about the spread")
    load, before = os.getloadavg()[0], Used.now()
    time.sleep(LOOK_S)
    others = before.others()
    if others > BUSY and not args.anyway:
        sys.exit(f"The machine is busy: others use {others:.0%} of it, load {load:.2f}. Wait, or say --anyway.")
    torch.set_num_threads(1)
    return Asked(args.short, args.repeats, args.out, load, others, Used.now())


def alternate(candidates: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run each candidate once per round, in an order that turns; what each returned behind the first round, by name."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(repeats + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            value = candidates[name]()
            if turn:
                found[name].append(value)
            if sys.stderr.isatty():
                print(f"\r\033[Kround {turn} of {repeats}: {name} {value:.4g}", end="", file=sys.stderr)
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
    during = what.began.others()
    load = f"load {what.load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end"
    share = f"others used {what.others:.0%} of the cores at the start, {during:.0%} meanwhile"
    form = "short form" if what.short else "full form"
    print(text)
    print(f"\n{machine()}; {load}; {share}; {form}, {what.repeats} rounds; {time.strftime('%Y-%m-%d')}")
    if what.others > BUSY:
        print("\n**On a busy machine (`--anyway`): indicative only.**")
    if what.out is not None:
        about = {"machine": machine(), "load": what.load, "others": what.others, "others meanwhile": during}
        what.out.write_text(json.dumps({**about, "short": what.short, **numbers}, indent=1))


def machine() -> str:
    """The machine in words."""
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, torch {torch.__version__}"


def _lines(name: str) -> list[str]:
    path = Path(name)
    return path.read_text().splitlines() if path.exists() else []
