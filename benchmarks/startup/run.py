"""From a captured and planned job to the first update of 4 workers: what the start of the processes costs.

The workers are forked; for comparison, an interpreter that only imports torch, which each would pay if it were spawned.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.overhead.run import TRANSPORTS, session
from roundelay.api.gathering import Event, Updated

WORKERS = 4


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
    candidates["one new interpreter: import torch"] = importing
    found = alternate(candidates, what.repeats)
    report(what, table(["", "s"], [[name, spread(values, 2)] for name, values in found.items()]), {"s": found})


if __name__ == "__main__":
    main()
