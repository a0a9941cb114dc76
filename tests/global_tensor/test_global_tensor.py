"""Global tensors on four processes: see :mod:`tests.global_tensor.program`, which they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.global_tensor.program import checks

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 100.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process has found, by check."""
    folder = tmp_path_factory.mktemp("found")
    said = run("-m", "tests.global_tensor.program", str(folder))
    files = [folder / f"{rank}.json" for rank in range(4)]
    assert any(file.exists() for file in files), said
    return [json.loads(file.read_text()) for file in files if file.exists()]


def run(*program: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TORCHRUN, *program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name, _ in checks()])
def test_four_processes_find_it_right(name: str, found: list[dict[str, str]]) -> None:
    texts = [of_rank[name] for of_rank in found if name in of_rank]
    assert [text for text in texts if text] == []
    assert len(texts) == 4, "a check before it has failed"


def test_the_program_of_table_4_runs() -> None:
    said = run("examples/table4.py")
    for rank, shape in enumerate(["(0,)", "(0,)", "(4, 3)", "(4, 3)"]):
        words = "GlobalTensor(shape=(4, 6), torch.float32, S(1) on ranks 2, 3), here"
        assert f"rank {rank}: {words} {shape}" in said, said
