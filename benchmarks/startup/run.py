"""From a captured and planned job to the first update of 4 workers: what the start of the processes costs.

The workers are forked; for comparison, an interpreter that only imports torch, which each would pay if it were spawned.
Beside it, what comes before: capturing the default job, and planning it with every operation measured afresh. And all
of it, as it is typed: from the command's start to the first update that it tells, imports included.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.overhead.run import TRANSPORTS, session
from roundelay import capture, plan
from roundelay.planning.job_file import load_job
from roundelay.session.events import Event, Updated

WORKERS = 4
LIMIT_S = 120.0
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


def typed(*launcher: str, options: Sequence[str] = ()) -> float:
    """Seconds from a command's start to the first update of the default job in its run folder."""
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        told = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, *launcher, "-m", "roundelay", "train", str(DEFAULT), *options]
        start = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--no-baseline", "--steps", "400", "--out", "run"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (told.exists() and told.stat().st_size):
                if process.poll() is not None or time.perf_counter() - start > LIMIT_S:
                    raise SystemExit(f"{' '.join(command)}: no update in {LIMIT_S:.0f} s, or an error")
                time.sleep(0.005)
            return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    what = asked(__doc__ or "", 5)
    candidates: dict[str, Callable[[], float]] = {
        f"4 workers over {transport}: to the first update": functools.partial(ours, transport)
        for transport in TRANSPORTS
    }
    os.environ["ROUNDELAY_CACHE"] = "none"  # else a plan is measured once
    candidates["the default job: captured and planned"] = planning
    candidates["one new interpreter: import torch"] = importing
    candidates["roundelay train --workers 4 --transport shm, as typed"] = functools.partial(
        typed, options=["--workers", str(WORKERS), "--transport", "shm"]
    )
    candidates["torchrun --nproc-per-node 4 -m roundelay train, as typed"] = functools.partial(
        typed, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"
    )
    found = alternate(candidates, what.repeats)
    report(what, table(["", "s"], [[name, spread(values, 2)] for name, values in found.items()]), {"s": found})


if __name__ == "__main__":
    main()
