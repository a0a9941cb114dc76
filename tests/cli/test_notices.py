"""What changes the training is told on every surface: the screen, JSON, Python, the launcher's output, the report."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundelay
from tests.cli.harness import ROOT, environment, here

Capture = pytest.CaptureFixture[str]

JOB = """
import torch
from torch import nn
from torch.nn import functional as F
import roundelay

def job(seed):
    data = [(torch.randn({rows}, 8), torch.randint(4, ({rows},))) for _ in range(4)]
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1], reduction="sum"),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )
"""
CHOICES = ("--workers", "2", "--micro-batches", "4", "--cuts", "equal")
TOLD = "4 micro-batches, as asked for, train the mean of their losses"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose loss is a sum over the batch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB.format(rows=8))
    return tmp_path / "job.py"


@pytest.mark.parametrize("command", ["plan", "train", "verify"])
def test_json_and_the_screen_tell(command: str, job: Path, capsys: Capture) -> None:
    length = () if command == "plan" else ("--steps", "2")
    said = here(capsys, command, job, *CHOICES, *length, "--json")
    assert [TOLD in notice for notice in said.json["notices"]] == [True]
    assert TOLD in " ".join(said.err.split())


def test_the_report_tells(job: Path, capsys: Capture) -> None:
    here(capsys, "train", job, *CHOICES, "--steps", "2", "--out", "run", "--no-baseline")
    here(capsys, "report", "run")
    (page,) = Path("run").glob("*.html")
    assert TOLD in page.read_text()


def test_a_comparison_tells_once(job: Path, capsys: Capture) -> None:
    said = here(
        capsys, "compare", job, *CHOICES, "--rules", "1f1b", "--steps", "2", "--seeds", "1", "--out", "c", "--json"
    )
    assert " ".join(said.err.split()).count(TOLD) == 1


def test_the_report_of_a_run_from_python_tells(job: Path) -> None:
    with pytest.warns(roundelay.PlanWarning, match=TOLD):
        trained = roundelay.train(job, workers=2, micro_batches=4, cuts="equal", steps=2, out="run")
    assert TOLD in trained.report().read_text()


def test_python_warns() -> None:
    data = [(torch.randn(8, 8), torch.randint(4, (8,)))]
    made = roundelay.Job(
        model=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1], reduction="sum"),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )
    for call in (roundelay.plan, roundelay.train, roundelay.verify):
        length = {} if call is roundelay.plan else {"steps": 1}
        with pytest.warns(roundelay.PlanWarning, match=TOLD) as caught:
            call(made, workers=2, micro_batches=4, cuts="equal", **length)  # type: ignore[operator]
        assert [warning.filename for warning in caught if TOLD in str(warning.message)] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error", roundelay.PlanWarning)
            call(made, workers=2, cuts="equal", **length)  # type: ignore[operator]


def test_a_launcher_s_leader_tells_once(job: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "roundelay", "train", str(job), *CHOICES[2:], "--steps", "2", "--no-baseline"],
        env=environment() | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stderr.split()).count(TOLD) == 1


def test_the_parts_that_really_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB.format(rows=3))
    notices = here(capsys, "plan", tmp_path / "job.py", *CHOICES, "--json").json["notices"]
    assert [notice for notice in notices if "3 micro-batches, as asked for, train" in notice]
