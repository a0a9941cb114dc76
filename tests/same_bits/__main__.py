"""Prove that a refactoring changed no bit: ``python -m tests.same_bits``, some minutes.

The same small jobs run once with the source of a commit and once with the source of this tree. Compared are the digests
of all weights, buffers, optimizer states and averages at the end, of a checkpoint in mid-flight where there is one, of
what ``roundelay.load`` makes of the last one, and every update's loss, metrics and learning rates.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from tests.same_bits.sides import ROOT, Result, Side, worktree
from tests.same_bits.table import KINDS, Case, cases, uncovered

BASE = "e8f8279"
OK, DIFFERENT, REFUSED, ONE_SIDE, FAILED = OUTCOMES = ("ok", "DIFFERENT", "refused-both", "ONE SIDE ONLY", "FAILED")
STYLES = {OK: "green", REFUSED: "yellow"}


def outcome(before: Result, after: Result) -> tuple[str, str]:
    """How the results of one job compare, and the details in words."""
    ran = [not (side["refused"] or side["failed"]) for side in (before, after)]
    if all(ran):
        odd = differences(before, after)
        return (DIFFERENT, told(odd)) if odd else (OK, "")
    messages = [side["failed"] or side["refused"] or "ran" for side in (before, after)]
    if any(ran) or bool(before["failed"]) != bool(after["failed"]):
        return ONE_SIDE, f"before: {messages[0]}; now: {messages[1]}"
    return (FAILED if before["failed"] else REFUSED), messages[1]


def differences(before: Result, after: Result) -> list[str]:
    """Names of what differs, or is there on one side only."""
    pairs = zip_longest(before["losses"], after["losses"])
    odd = [f"loss of update {i}" for i, (one, other) in enumerate(pairs) if one != other]
    names = sorted({*before["digests"], *after["digests"]})
    return odd + [name for name in names if before["digests"].get(name) != after["digests"].get(name)]


def told(odd: Sequence[str]) -> str:
    """The first few names of many."""
    more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    return ", ".join(odd[:4]) + more


class Comparison:
    """Pairs the results of both sides and prints a line for each job that both have done.

    Args:
        console: where to print.
        numbers: of the jobs.
    """

    def __init__(self, console: Console, numbers: Sequence[int]) -> None:
        self._console, self._every, self._total = console, cases(), len(numbers)
        self._results: dict[int, dict[str, Result]] = {number: {} for number in numbers}
        self._lock = threading.Lock()
        self.found: dict[int, tuple[str, str]] = {}
        self.compared = 0

    def take(self, side: str, number: int, result: Result) -> None:
        """Take one side's result of a job."""
        with self._lock:
            self._results[number][side] = result
            if len(self._results[number]) == 2:
                self._compare(number)

    def _compare(self, number: int) -> None:
        before, after = self._results[number]["before"], self._results[number]["after"]
        self.found[number] = found, details = outcome(before, after)
        self.compared += len(after["digests"]) + len(after["losses"])
        style = STYLES.get(found, "red")
        line = f"{len(self.found):3} of {self._total} [{style}]{found}[/] {self._every[number].name}"
        self._console.print(f"{line} ({before['seconds']:.1f} s, {after['seconds']:.1f} s)", highlight=False)
        if details:
            self._console.print(f"    {details}", highlight=False, markup=False)

    def table(self, seconds: float) -> Table:
        """How many jobs of each kind and each rule ended how."""
        table = Table(Column("jobs", no_wrap=True), *OUTCOMES, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, belongs in (*((k, "kind") for k in KINDS), *((r, "rule") for r in _rules(self._every))):
            mine = [n for n in self.found if getattr(self._every[n], belongs) == name]
            _add(table, f"{belongs} {name}", [self.found[n][0] for n in mine])
        table.add_section()
        _add(table, "all", [found for found, _ in self.found.values()])
        table.caption = f"{self.compared} digests and losses compared in {seconds:.0f} s"
        return table

    @property
    def equal(self) -> bool:
        """Whether every job gave the same on both sides, or was refused by both."""
        return len(self.found) == self._total and {found for found, _ in self.found.values()} <= {OK, REFUSED}


def _rules(every: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.rule for case in every))


def _add(table: Table, name: str, found: Sequence[str]) -> None:
    counts = Counter(found)
    if found:
        table.add_row(name, *(str(counts[kind] or "") for kind in OUTCOMES))


def listed(console: Console, numbers: Sequence[int]) -> None:
    """Print the jobs, and what meets in none of all."""
    every = cases()
    for number in numbers:
        console.print(f"{number:3} {every[number].name}", highlight=False)
    missing = uncovered(every)
    console.print(f"{len(numbers)} jobs; pairs of choices that meet in none of all: {len(missing)}", highlight=False)
    for pair in missing:
        console.print(f"    {pair}", highlight=False)


def compare(console: Console, numbers: Sequence[int], against: str, source: Path) -> bool:
    """Run the jobs on both sides, at the same time; whether all is equal."""
    began, comparison = time.perf_counter(), Comparison(console, numbers)
    with worktree(against) as tree, tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        console.print(f"before: {against}; now: {source}", highlight=False)
        with (
            Side(tree / "src", Path(folder) / "before", numbers, lambda n, r: comparison.take("before", n, r)),
            Side(source, Path(folder) / "after", numbers, lambda n, r: comparison.take("after", n, r)),
        ):
            pass
    console.print(comparison.table(time.perf_counter() - began))
    return comparison.equal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 1 if anything differs, or ran on one side only."""
    parser = argparse.ArgumentParser(prog="python -m tests.same_bits", description="Do two sources compute the same?")
    parser.add_argument("--against", default=BASE, metavar="COMMIT", help=f"what to compare with; default: {BASE}")
    parser.add_argument("--only", default="", metavar="PATTERN", help="jobs in whose names this regular expression is")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="other than this tree's src, to try it out")
    parser.add_argument("--list", action="store_true", help="name the jobs and run none")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # no process and no worktree stays
    console = Console(soft_wrap=True)
    numbers = [number for number, case in enumerate(cases()) if re.search(given.only, case.name)]
    if given.list or not numbers:
        listed(console, numbers)
        return 0 if numbers else 1
    return 0 if compare(console, numbers, given.against, given.source.resolve()) else 1


if __name__ == "__main__":
    sys.exit(main())
