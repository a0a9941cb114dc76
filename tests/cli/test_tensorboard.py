"""`train --tensorboard`: the curves are the metrics, through restarts and continued runs; and a missing package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from roundelay.observe.metrics_file import read_metrics
from roundelay.observe.tensorboard import WRITER
from tests.cli.harness import MLP, here, job_file, one_screen
from tests.observe.event_files import points

Capture = pytest.CaptureFixture[str]

DIES_ONCE = """
import itertools, os, signal, time
from pathlib import Path

HOME = os.getpid()
backwards = itertools.count()

class Die(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if os.getpid() != HOME and next(backwards) == mlp.BATCHES + 2 and not Path("died").exists():
            deadline = time.monotonic() + 60.0
            while not Path("run/checkpoint/checkpoint.json").exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return grad

def loss(outputs, batch):
    return mlp.loss(Die.apply(outputs), batch)
"""


def curves_of(metrics: list[dict[str, Any]]) -> dict[str, list[tuple[int, Any]]]:
    """The curves that the lines of metrics.jsonl make; TensorBoard keeps 32 bits of a value."""

    def curve(*keys: Any) -> list[tuple[int, Any]]:
        found = []
        for line in metrics:
            value: Any = line
            for key in keys:
                value = value[key]
            found.append((line["update"], pytest.approx(value)))
        return found

    return {
        "loss": curve("loss"),
        "samples_per_second": curve("samples_per_second"),
        "learning_rate/group_0": curve("learning_rates", 0),
        "busy/worker_0": curve("busy", 0),
        "busy/worker_1": curve("busy", 1),
    }


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_the_curves_are_the_metrics_and_the_evaluations(capsys: Capture, workplace: Path, transport: str) -> None:
    changes = (
        "evaluate=lambda m: {'size': m[0].in_features}, "
        "scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)"
    )
    job = job_file(workplace, changes)
    said = here(
        capsys, "train", job, "--workers", 2, "--epochs", 2, "--no-baseline", "--transport", transport, "--out", "run",
        "--tensorboard",
    )  # fmt: skip
    assert said.code == 0, said.err
    metrics = read_metrics(Path("run/metrics.jsonl"))
    assert [line["learning_rates"] for line in metrics] == [[pytest.approx(3e-3 / 2**t)] for t in range(12)]
    assert points(Path("run/tensorboard")) == {**curves_of(metrics), "evaluation/size": [(5, 6.0), (11, 6.0)]}


def test_without_the_option_there_are_none(capsys: Capture, workplace: Path) -> None:
    here(capsys, "train", MLP, "--steps", 2, "--no-baseline", "--out", "run")
    assert not Path("run/tensorboard").exists()


def test_after_a_restart_every_update_is_on_a_curve_once(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "loss=loss", DIES_ONCE)
    said = here(
        capsys, "train", job, "--workers", 2, "--epochs", 3, "--no-baseline", "--transport", "gloo", "--out", "run",
        "--rule", "pipeoptim", "--micro-batches", 1, "--restarts", 1, "--tensorboard",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "Restart 1: continuing after update 6." in said.err
    metrics = read_metrics(Path("run/metrics.jsonl"))
    assert [line["update"] for line in metrics] == list(range(18))
    assert points(Path("run/tensorboard")) == curves_of(metrics)
    assert len(list(Path("run/tensorboard").iterdir())) == 2  # the first writer was closed before workers were forked


def test_a_continued_run_s_curves_go_on_at_its_update(capsys: Capture, workplace: Path) -> None:
    for more in (["--steps", 4, "--out", "first"], ["--steps", 3, "--from", "first", "--out", "second"]):
        assert here(capsys, "train", MLP, "--workers", 2, "--no-baseline", "--tensorboard", *more).code == 0
    assert [update for update, _ in points(Path("first/tensorboard"))["loss"]] == [0, 1, 2, 3]
    assert [update for update, _ in points(Path("second/tensorboard"))["loss"]] == [4, 5, 6]


def test_a_missing_package_is_told_before_anything_starts(
    capsys: Capture, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, WRITER, None)
    said = here(capsys, "train", "no_such_job.py", "--tensorboard")
    one_screen(said, "--tensorboard", "pip install tensorboard")
    assert said.code == 2
    assert not list(workplace.iterdir())
