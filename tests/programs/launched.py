"""Programs under torchrun, with two parts of a batch and an evaluation: do they train as in one process?

python -m tests.programs.launched [PATTERN]: a line for each program that trains and whose name has the pattern in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from roundelay.checkpoint.checkpoint import load
from tests.programs import buffers, calls, losses, results, states, weights  # noqa: F401  they fill the table
from tests.programs.plain import STEPS, difference, trained
from tests.programs.table import PROGRAMS

ROOT = Path(__file__).parents[2]
FILE = """
from dataclasses import replace
from tests.programs import launched
from tests.programs.plain import fresh
def job(seed):
    made = fresh(launched.PROGRAMS["{name}"].make)
    return replace(made, evaluate=made.evaluate or (lambda model: {{"weights": 0.0}}))
"""
LIMIT_S = 120


def launched(name: str, micro_batches: int, *options: str) -> str:
    """How the run of one program under torchrun differs from that in this process; empty: in nothing."""
    one = PROGRAMS[name]
    choices = {"rule": "1f1b", "micro_batches": micro_batches}
    torch.set_num_threads(1)
    here = trained(one.make, **choices)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(FILE.format(name=name))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "roundelay", "train"]
        length = ["job.py", "--no-baseline", "--steps", str(STEPS), "--out", "run", "--rule", "1f1b"]
        done = subprocess.run(
            [sys.executable, *command, *length, "--micro-batches", str(micro_batches), *options],
            cwd=folder,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "OMP_NUM_THREADS": "1",
                "ROUNDELAY_CORES": "2",
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            return f"ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
        saved = load(Path(folder) / "run" / "checkpoint").parameters
    whole = {name: saved.get(name, tensor) for name, tensor in here[1].items()}  # tied ones once, no others' caches
    return difference(here, (here[0], whole), rounding=one.rounding)


def main(pattern: str = "") -> int:
    """Run them and print; the number of those that differ."""
    odd = 0
    for name, one in sorted(PROGRAMS.items()):
        if one.refused is None and pattern in name:
            found = launched(name, 2)
            odd += bool(found)
            print(f"{name:60} {found or 'as in one process'}", flush=True)
    return odd


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
