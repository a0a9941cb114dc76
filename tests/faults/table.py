"""Strike many runs at random and print the table: ``python -m tests.faults.table --cases 160``."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.faults.case import MOMENTS, Case, Outcome, Server, draw, play

SHARED = Path("/dev/shm")


Play = Callable[[int, Path], tuple[Case, Outcome]]
"""Draws a case from a seed and runs it in an empty folder."""


def main() -> None:
    strike(__doc__ or "", 160, locally)


@contextmanager
def locally() -> Iterator[Play]:
    """Runs that start their workers themselves; every third is gone on with."""
    server = Server()
    try:
        yield lambda seed, folder: (draw(seed), play(draw(seed), folder, server, go_on=seed % 3 == 0))
    finally:
        server.close()


def strike(description: str, cases: int, player: Callable[[], AbstractContextManager[Play]]) -> None:
    """Strike, print the table, and exit with what came of it.

    Args:
        description: of the command.
        cases: how many, unless the command line says otherwise.
        player: one for each thread.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    began, before = time.monotonic(), _shared()
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(asked.cases):
        seeds.put(asked.seed + number)
    done: list[tuple[int, Case, Outcome]] = []
    threads = [threading.Thread(target=_work, args=(player, seeds, done)) for _ in range(asked.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [(seed, case, outcome) for seed, case, outcome in sorted(done, key=lambda d: d[0]) if outcome.faults]
    print(table(done))
    print(f"\n{by_moment(done)}")
    left = sorted(_shared() - before)
    if left:
        print(f"\nLeft in {SHARED}: {left}")
    for seed, case, outcome in wrong:
        print(f"\nseed {seed}, {case}\n  exit code {outcome.code}: {'; '.join(outcome.faults)}\n{outcome.said}")
    late, went_on = (sum(getattr(outcome, name) for _, _, outcome in done) for name in ("late", "went_on"))
    print(
        f"\n{len(done)} faults, {late} of them behind the run's end, {went_on} runs gone on with, {len(wrong)} wrong, "
        f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}"
    )
    sys.exit(1 if wrong or left or len(done) < asked.cases else 0)


def _shared() -> set[str]:
    """Names of what lies in shared memory."""
    return {entry.name for entry in SHARED.glob("*")}


def _work(
    player: Callable[[], AbstractContextManager[Play]],
    seeds: queue.SimpleQueue[int],
    done: list[tuple[int, Case, Outcome]],
) -> None:
    with player() as played:
        while True:
            try:
                seed = seeds.get_nowait()
            except queue.Empty:
                return
            with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
                done.append((seed, *played(seed, Path(folder))))
            if sys.stderr.isatty():
                print(f"\r{len(done)} faults", end="", file=sys.stderr)


def table(done: list[tuple[int, Case, Outcome]]) -> str:
    """Markdown: a row for each transport, fault and victim."""
    rows: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for _, case, outcome in done:
        rows[case.transport, case.fault, "launcher" if case.victim < 0 else "worker"].append(outcome)
    lines = [
        "| transport | fault | on | cases | behind the end | wrong | slowest end, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for (transport, fault, victim), outcomes in sorted(rows.items()):
        counts = len(outcomes), sum(o.late for o in outcomes), sum(bool(o.faults) for o in outcomes)
        slowest = max((o.seconds for o in outcomes if not o.late), default=0.0)
        lines.append(f"| {transport} | {fault} | {victim} | {counts[0]} | {counts[1]} | {counts[2]} | {slowest:.1f} |")
    return "\n".join(lines)


def by_moment(done: list[tuple[int, Case, Outcome]]) -> str:
    """Markdown: a row for each moment."""
    rows: dict[str, list[Outcome]] = {moment: [] for moment in MOMENTS}
    for _, case, outcome in done:
        rows[case.moment].append(outcome)
    lines = ["| moment | cases | behind the end | wrong | gone on with |", "|---|---|---|---|---|"]
    for moment, outcomes in rows.items():
        counts = [sum(map(bool, (getattr(o, name) for o in outcomes))) for name in ("late", "faults", "went_on")]
        lines.append(f"| {moment} | {len(outcomes)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
