"""Real compute: the default job (a GPT on Python's own source text) against plain PyTorch, on the same two cores.

Ours: 2 workers of one thread each, over memory. Plain: the loop that everybody writes, with one thread and with two.
Both with and without the settings of the C library's memory that `roundelay` starts itself with. Every run is a
process of its own; they take turns.
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
from roundelay.env import MALLOC

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = ROOT / "examples" / "char_gpt.py"
PLAIN = """
import sys
import torch
from roundelay.api.plain_baseline import measure
from roundelay.cli.job_file import load_job
from pathlib import Path
torch.set_num_threads(1)
path, threads = Path(sys.argv[1]), int(sys.argv[2])
print(measure(load_job(path, 0), 0, threads))
"""


def environment(malloc: bool) -> dict[str, str]:
    """Ours keeps what is set; ``keep`` stops it from setting anything itself."""
    bare = {name: value for name, value in os.environ.items() if name not in MALLOC}
    return bare | {"PYTHONPATH": str(ROOT / "src"), "ROUNDELAY_MALLOC": "keep"} | (MALLOC if malloc else {})


def ours(transport: str, malloc: bool, steps: int) -> float:
    """Samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "roundelay", "train", str(JOB), "--workers", "2", "--transport", transport]
        command += ["--steps", str(steps), "--no-baseline", "--json", "--out", "run"]
        done = subprocess.run(
            command, cwd=folder, env=environment(malloc), check=True, capture_output=True, text=True, timeout=600
        )
        return float(json.loads(done.stdout)["samples_per_second"])


def plain(threads: int, malloc: bool) -> float:
    """Samples per second."""
    command = [sys.executable, "-c", PLAIN, str(JOB), str(threads)]
    done = subprocess.run(command, env=environment(malloc), check=True, capture_output=True, text=True, timeout=600)
    return float(done.stdout)


def main() -> None:
    what = asked(__doc__ or "", 5)
    steps = 30 if what.short else 60
    candidates: dict[str, Callable[[], float]] = {}
    for malloc in (False, True):
        words = "with malloc settings" if malloc else "without"
        for threads in (1, 2):
            name = f"plain PyTorch, {threads} thread{'s' * (threads > 1)}, {words}"
            candidates[name] = functools.partial(plain, threads, malloc)
        candidates[f"2 workers over memory, {words}"] = functools.partial(ours, "memory", malloc, steps)
    found = alternate(candidates, what.repeats)
    best = max(statistics.median(found[name]) for name in found if "2 threads" in name)
    rows = [[n, spread(v), f"{statistics.median(v) / best:.2f}"] for n, v in found.items()]
    report(what, table(["", "samples/s", "x the better plain run of 2 threads"], rows), {"samples_per_second": found})


if __name__ == "__main__":
    main()
