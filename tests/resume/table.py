"""Kill runs at random moments, go on, compare bit for bit, print the table: ``python -m tests.resume.table``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.case import Server
from tests.resume.kill import RULES, Case, Outcome, draw, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20, help="moments to kill at, for each rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", default=",".join(RULES))
    asked = parser.parse_args()
    began, wrong = time.monotonic(), 0
    server = Server()
    print("| rule | kills | checkpoint left | while it was written | micro-batches in flight | bit-equal |")
    print("|---|---|---|---|---|---|", flush=True)
    for rule in asked.rules.split(","):
        done: list[tuple[Case, Outcome]] = []
        for point in range(asked.points):
            case = draw(rule, asked.seed + point)
            with tempfile.TemporaryDirectory(prefix="resume-") as folder:
                done.append((case, play(case, Path(folder), server)))
            if done[-1][1].faults:
                print(f"{case}: {done[-1][1]}", file=sys.stderr, flush=True)
        wrong += sum(bool(outcome.faults) for _, outcome in done)
        print(row(rule, [outcome for _, outcome in done]), flush=True)
    server.close()
    print(f"\n{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")
    sys.exit(1 if wrong else 0)


def row(rule: str, outcomes: list[Outcome]) -> str:
    """A line of the table."""
    kills = [kill for outcome in outcomes for kill in outcome.killed]
    left = sum(updates > 0 for _, updates in kills)
    flying = [outcome.in_flight for outcome in outcomes]
    amid = sum(outcome.amid for outcome in outcomes)
    equal = sum(not outcome.faults for outcome in outcomes)
    return f"| {rule} | {len(kills)} | {left} | {amid} | {min(flying)} to {max(flying)} | {equal} of {len(outcomes)} |"


if __name__ == "__main__":
    main()
