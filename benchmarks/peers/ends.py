"""How soon is a lost machine told? Each of three hosted ones in turn is killed or stopped in the middle of a run.

Seconds are those until all others have ended with 1 and named it, on this machine; a cut line is in tests/wan. The age
is that of the host's checkpoint, in updates behind the last one written down, of `--checkpoint-every 25`. Ends with 1
if one is told later than is wanted, by another name, or if a checkpoint is older.

    .venv/bin/python -m benchmarks.peers.ends [--repeats 5] [--short] [--anyway] [--out FILE]
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import asked, report, table
from tests.peers.test_ends import ENDLESS, EVERY, lost, saved, training, update

NAMES = ("host", "worker-1", "worker-2")
FAULTS = {"killed": (signal.SIGKILL, 2.0), "stopped": (signal.SIGSTOP, 5.0)}
"""The signal, and seconds in which all others must have told."""

PATIENCE_S = 30.0


def struck(victim: int, number: int) -> tuple[float, int, list[str]]:
    """Seconds until all others had ended, the checkpoint's age, and what was not as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        run, joined = training(Path(folder), "R", "--steps", ENDLESS)
        machines = [run.host, *joined]
        began = time.monotonic()
        os.kill(machines[victim].pid, number)
        others = [machine for k, machine in enumerate(machines) if k != victim]
        for machine in others:
            machine.wait(PATIENCE_S)
        took_s = time.monotonic() - began
        machines[victim].kill()
        said = run.ended(joined)
        age = update(Path(folder) / "R") - saved(Path(folder) / "R")
        wrong = [
            f"{NAMES[victim]}: {NAMES[k]} ended with {one.code}, {lost(one)}"
            for k, one in enumerate(said)
            if k != victim and (one.code, [x.split(": ")[1] for x in lost(one)]) != (1, [NAMES[victim]])
        ]
    return took_s, age, wrong


def main() -> None:
    """Run, and print a table."""
    what = asked(__doc__ or "")
    repeats = 1 if what.short else what.repeats
    rows, found, wrong = [], {}, list[str]()
    for fault, (number, most_s) in FAULTS.items():
        for victim, name in enumerate(NAMES):
            ends = [struck(victim, number) for _ in range(repeats)]
            seconds, ages = [end[0] for end in ends], [end[1] for end in ends]
            found[f"{name} {fault}"] = seconds
            wrong += [each for end in ends for each in end[2]]
            wrong += [f"{name} {fault}: {max(seconds):.1f} s"] if max(seconds) > most_s else []
            wrong += [f"{name} {fault}: a checkpoint {max(ages)} updates old"] if max(ages) > EVERY else []
            spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
            rows.append([f"{name} {fault}", spread, f"{most_s:g}", str(max(ages))])
    head = ["machine", "seconds until all others have told it", "wanted", "oldest checkpoint, updates"]
    told = "; ".join(wrong) or "All as wanted."
    report(what, f"{table(head, rows)}\n\n{told}", {"seconds": found, "wrong": wrong})
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
