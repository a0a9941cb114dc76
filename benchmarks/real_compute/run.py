"""Real compute on all cores of one machine: one worker, two workers, and plain PyTorch, for three jobs.

Ours: one worker with a thread per core, and two workers with half of them each, over memory. Plain: the loop that
everybody writes, with one thread and with one per core, without and with the settings of the C library's memory that
`roundelay` starts itself with. Every run is a process of its own; they take turns.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import alternate, asked, report, spread, table
from roundelay.cores import usable_cores
from roundelay.env import MALLOC

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
STEPS, SHORT_STEPS = 60, 30
JOBS = {"char_gpt": ROOT / "examples" / "char_gpt.py", "GPT-2": HERE / "gpt2.py", "MLP": HERE / "mlp.py"}
PLAIN = """
import sys
from roundelay.proof.plain_baseline import measure
from roundelay.planning.job_file import load_job
from pathlib import Path
path, threads = Path(sys.argv[1]), int(sys.argv[2])
print(measure(load_job(path, 0), 0, threads))
"""


def environment(malloc: bool) -> dict[str, str]:
    """Ours keeps what is set; ``keep`` stops it from setting anything itself."""
    bare = {name: value for name, value in os.environ.items() if name not in {*MALLOC, "OMP_NUM_THREADS"}}
    return bare | {"PYTHONPATH": str(ROOT / "src"), "ROUNDELAY_MALLOC": "keep"} | (MALLOC if malloc else {})


def ours(job: Path, workers: int, steps: int) -> float:
    """Samples per second, with the settings of memory that `roundelay` chooses."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "roundelay", "train", str(job), "--workers", str(workers)]
        command += ["--steps", str(steps), "--check", "off", "--json", "--out", "run"]
        done = subprocess.run(
            command, cwd=folder, env=environment(True), check=True, capture_output=True, text=True, timeout=600
        )
        return float(json.loads(done.stdout)["samples_per_second"])


def plain(job: Path, threads: int, malloc: bool) -> float:
    """Samples per second."""
    command = [sys.executable, "-c", PLAIN, str(job), str(threads)]
    done = subprocess.run(command, env=environment(malloc), check=True, capture_output=True, text=True, timeout=600)
    return float(done.stdout)


def candidates_of(name: str, job: Path, steps: int) -> dict[str, Callable[[], float]]:
    """What is measured of a job."""
    cores = usable_cores()
    return {
        f"{name}: plain, 1 thread": functools.partial(plain, job, 1, False),
        f"{name}: plain, {cores} threads": functools.partial(plain, job, cores, False),
        f"{name}: plain, {cores} threads, with malloc settings": functools.partial(plain, job, cores, True),
        f"{name}: 1 worker": functools.partial(ours, job, 1, steps),
        f"{name}: 2 workers": functools.partial(ours, job, 2, steps),
    }


def main() -> None:
    what = asked(__doc__ or "", 5)
    names = ["MLP"] if what.short else list(JOBS)
    found: dict[str, list[float]] = {}
    rows = []
    for name in names:
        own = alternate(
            candidates_of(name, JOBS[name], SHORT_STEPS if what.short or name == "GPT-2" else STEPS), what.repeats
        )
        base = statistics.median(next(values for each, values in own.items() if each.endswith("threads")))
        rows += [[each, spread(values), f"{statistics.median(values) / base:.2f}"] for each, values in own.items()]
        found |= own
    report(what, table(["", "samples/s", "x plain, all threads"], rows), {"samples_per_second": found})


if __name__ == "__main__":
    main()
