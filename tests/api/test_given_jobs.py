"""``roundelay.train`` of a job, a function or a path; loaders as batches; run folders, reports and progress."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

import roundelay
from roundelay.errors import JobError, UsageError
from tests.cli.harness import environment

FILE = """
import torch
from torch import nn
from torch.nn import functional
import roundelay

def job(seed):
    data = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(4)]
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
"""
CHOICES: dict[str, Any] = {"workers": 2, "micro_batches": 2, "cuts": "equal"}


def loader(**options: Any) -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 8, generator=draws), torch.randint(4, (32,), generator=draws))
    return DataLoader(data, batch_size=8, **options)


def job(batches: Any = None) -> roundelay.Job:
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=loader() if batches is None else batches,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def losses(trained: Any) -> list[float]:
    return [update.loss for update in trained.updates]


# --- what is given


def test_a_function_and_a_path_are_seeded_as_the_command_seeds(tmp_path: Path) -> None:
    path = tmp_path / "my_job.py"
    path.write_text(FILE)
    space: dict[str, Any] = {}
    exec(compile(FILE, str(path), "exec"), space)
    arguments = list(sys.argv)
    by_path = losses(roundelay.train(path, seed=3, steps=4, **CHOICES))
    assert losses(roundelay.train(str(path), seed=3, steps=4, **CHOICES)) == by_path
    assert losses(roundelay.train(space["job"], seed=3, steps=4, **CHOICES)) == by_path
    assert losses(roundelay.train(path, seed=4, steps=4, **CHOICES)) != by_path
    assert sys.argv == arguments
    command = [sys.executable, "-m", "roundelay", "train", str(path), "--seed", "3", "--steps", "4", "--json"]
    command += ["--workers", "2", "--micro-batches", "2", "--cuts", "equal", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f'"loss_last": {by_path[-1]}' in done.stdout
    assert roundelay.verify(path, steps=2, **CHOICES).equal
    assert roundelay.plan(path, **CHOICES).num_workers == 2


@pytest.mark.parametrize("given", [None, 3, lambda seed: "no job"])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(JobError, match=r"the job: got .*; expected a roundelay.Job, a function"):
        roundelay.train(given, steps=1)


# --- loaders


def test_a_loader_is_iterated_in_every_epoch() -> None:
    torch.manual_seed(0)
    by_loader = losses(roundelay.train(job(loader(shuffle=True)), epochs=2, **CHOICES))
    torch.manual_seed(0)
    own = loader(shuffle=True)
    assert losses(roundelay.train(job(lambda epoch: own), epochs=2, **CHOICES)) == by_loader
    assert len(by_loader) == 8


def test_set_epoch_is_called() -> None:
    class Turned(Sampler[int]):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter([*range(32)][:: -1 if self.epochs[-1] % 2 else 1])

        def __len__(self) -> int:
            return 32

    sampler = Turned()
    roundelay.train(job(loader(sampler=sampler)), epochs=2, **CHOICES)
    assert sampler.epochs == [0, 1]


@pytest.mark.parametrize("make", [lambda: iter(loader()), lambda: (batch for batch in loader())])
def test_what_can_be_read_once_is_refused(make: Any) -> None:
    with pytest.raises(JobError, match="which can be read only once; expected a DataLoader or a list"):
        roundelay.train(job(make()), steps=1)


# --- folders, progress, reports


def test_a_run_has_a_folder_and_a_report_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROUNDELAY_RUNS")
    trained = roundelay.train(job(), epochs=1, **CHOICES)
    assert trained.folder is not None
    assert (tmp_path / "runs" / "latest").resolve() == trained.folder.resolve()
    made = {path.name for path in trained.folder.iterdir()}
    assert made >= {"plan.toml", "metrics.jsonl", "summary.json", "trace.json", "checkpoint"}
    assert f"Run folder: {trained.folder}" in capfd.readouterr().err
    page = trained.report()
    assert page == trained.folder / "report.html"
    assert "<svg" in page.read_text()
    again = roundelay.train(job(), epochs=2, resume=trained.folder, out="second", progress=False, **CHOICES)
    assert again.folder == Path("second")
    assert capfd.readouterr().err == ""


def test_no_folder_is_made_if_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROUNDELAY_RUNS")
    trained = roundelay.train(job(), epochs=1, out=False, **CHOICES)
    assert trained.folder is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="a run without a folder"):
        trained.report()


def test_a_folder_that_is_taken_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").write_text("mine")
    with pytest.raises(UsageError, match="taken"):
        roundelay.train(job(), epochs=1, out=tmp_path / "taken")


def test_a_run_that_fails_before_it_trains_leaves_no_folder(tmp_path: Path) -> None:
    def raising(epoch: int) -> Any:
        if epoch:
            raise ValueError("no data")
        return loader()

    trained = job(raising)
    with pytest.raises(roundelay.RoundelayError):
        roundelay.train(trained, steps=1, out=tmp_path / "run", clip="nonsense")
    assert not (tmp_path / "run").exists()
