"""From a captured and planned job to the first update of 4 workers: what the start of the processes costs.

The workers are forked; for comparison, an interpreter that only imports torch, which each would pay if it were spawned.
Beside it, what comes before: capturing the default job, and planning it with every operation measured afresh.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.overhead.run import TRANSPORTS, session
from roundelay import capture, plan
from roundelay.api.gathering import Event, Updated
from roundelay.cli.job_file import load_job

WORKERS = 4
DEFAULT = Path(__file__).parent.parent.parent / "examples" / "char_gpt.py"


def ours(transport: str) -> float:
    """Seconds from the start of a run to its first update."""
    first: list[float] = []

    def notify(event: Event) -> None:
        if isinstance(event, Updated) and not first:
            first.append(time.perf_counter())

    prepared = session("pipedream", transport, WORKERS, 2)
    start = time.perf_counter()
    prepared.run(notify=notify)
    return first[0] - start


def planning() -> float:
    """Seconds from the default job, loaded, to its plan."""
    job = load_job(DEFAULT, 0)
    start = time.perf_counter()
    plan(job, captured=capture(job), workers=WORKERS)
    return time.perf_counter() - start


def importing() -> float:
    """Seconds that a new interpreter needs to import torch."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
    return time.perf_counter() - start


def main() -> None:
    what = asked(__doc__ or "", 5)
    candidates: dict[str, Callable[[], float]] = {
        f"4 workers over {transport}: to the first update": functools.partial(ours, transport)
        for transport in TRANSPORTS
    }
    os.environ["ROUNDELAY_CACHE"] = "none"  # else a plan is measured once
    candidates["the default job: captured and planned"] = planning
    candidates["one new interpreter: import torch"] = importing
    found = alternate(candidates, what.repeats)
    report(what, table(["", "s"], [[name, spread(values, 2)] for name, values in found.items()]), {"s": found})


if __name__ == "__main__":
    main()
