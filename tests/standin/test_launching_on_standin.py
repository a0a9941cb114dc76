"""One command that uses every device of a host, with a process for each: on two stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roundelay.checkpoint.checkpoint import load
from tests.standin.build import CannotStandInError, library
from tests.standin.inner import DEADLINE_S, ROOT

JOB = ROOT / "tests" / "cli" / "jobs" / "mlp.py"


def train(tmp_path: Path, out: str, module: str, *options: str) -> str:
    """Train on the stand-in; returns what was printed on stderr."""
    words = ["train", str(JOB), "--rule", "1f1b", "--steps", "6", "--check", "off", "--out", out, *options]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.standin", "-m", module, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.mark.timeout(DEADLINE_S)
def test_a_process_for_each_device_computes_what_threads_do(tmp_path: Path) -> None:
    """Without --workers there is one for each device."""
    try:
        library()
    except CannotStandInError as error:
        pytest.skip(f"no stand-in for a CUDA device: {error}")
    train(tmp_path, "processes", "tests.standin.launched", "--transport", "nccl")
    train(tmp_path, "threads", "roundelay")
    plan = (tmp_path / "processes" / "plan.toml").read_text()
    assert 'device = "cuda:0"' in plan
    assert 'device = "cuda:1"' in plan
    runs = [load(tmp_path / name / "checkpoint").parameters for name in ("processes", "threads")]
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
