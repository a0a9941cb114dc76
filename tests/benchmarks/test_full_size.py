"""The jobs of full size, on a handful of data in the same formats; what is missing is told in one paragraph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import roundelay
from benchmarks.datasets import cifar
from roundelay.errors import JobError
from roundelay.planning.job_file import load_job
from tests.benchmarks.test_datasets import write_cifar, write_imdb, write_tiny_imagenet
from tests.benchmarks.test_imagenet import write_imagenet

FOLDER = Path(__file__).parents[2] / "benchmarks"
JOBS: dict[str, tuple[str, dict[str, str], Callable[[Path], object], float]] = {
    "cifar10": ("cdp/jobs/cifar10.py", {"DEPTH": "18"}, lambda f: write_cifar(f, cifar.CIFAR_10), 0.05),
    "cifar100": ("pipeoptim/jobs/cifar100.py", {}, lambda f: write_cifar(f, cifar.CIFAR_100), 1e-3),
    "googlenet": (
        "pipeoptim/jobs/cifar100.py",
        {"NETWORK": "googlenet"},
        lambda f: write_cifar(f, cifar.CIFAR_100),
        1e-3,
    ),
    "imagenet": ("cdp/jobs/imagenet.py", {"DEPTH": "18", "SIDE": "32"}, write_imagenet, 0.1),
    "tiny": ("pipeoptim/jobs/tiny_imagenet.py", {"NETWORK": "alexnet"}, write_tiny_imagenet, 0.01),
    "imdb": ("pipeoptim/jobs/imdb.py", {"OPTIMIZER": "adam", "LENGTH": "4"}, write_imdb, 1e-3),
}


@pytest.fixture(params=JOBS)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, float]:
    """A job's file, and its learning rate; its data lie where it looks for them."""
    name, variables, write, rate = JOBS[request.param]
    write(tmp_path / "data")
    for variable, value in {"DATA": str(tmp_path / "data"), "ROWS": "2", **variables}.items():
        monkeypatch.setenv(variable, value)
    return FOLDER / name, rate


def test_a_job_reads_its_folder_and_trains_and_is_evaluated(made: tuple[Path, float]) -> None:
    path, rate = made
    job = load_job(path, 0)
    batches = list(job.batches(0))
    assert {len(labels) for _, labels in batches} == {2}
    named = list(job.model.named_parameters())
    optimizer = job.optimizer(named)
    assert optimizer.param_groups[0]["lr"] == rate
    torch.set_num_threads(1)
    loss = job.loss(job.model(batches[0][0]), batches[0])
    loss.backward()
    before = named[0][1].detach().clone()
    optimizer.step()
    assert torch.isfinite(loss)
    assert not torch.equal(before, named[0][1])
    assert job.evaluate is not None
    with torch.no_grad():
        found = job.evaluate(job.model.eval())
    assert 0 <= found["accuracy"] <= found["top5"] <= 1


def test_without_the_variable_or_the_folder_one_paragraph_says_so(
    made: tuple[Path, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATA", str(tmp_path / "none"))
    with pytest.raises(JobError, match="nothing there"):
        load_job(made[0], 0)
    monkeypatch.delenv("DATA")
    with pytest.raises(JobError, match="Begin the command with DATA="):
        load_job(made[0], 0)


def test_a_batch_that_is_larger_than_the_data_is_refused(
    made: tuple[Path, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS", "100")
    with pytest.raises(JobError, match="at least a batch, 100"):
        load_job(made[0], 0)
    monkeypatch.setenv("ROWS", "none")
    with pytest.raises(JobError, match="a whole number above zero"):
        load_job(made[0], 0)


def test_a_network_that_the_job_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "data", cifar.CIFAR_100)
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NETWORK", "vgg19")
    with pytest.raises(JobError, match="expected vgg16 or googlenet"):
        load_job(FOLDER / "pipeoptim/jobs/cifar100.py", 0)


@pytest.mark.parametrize(
    ("name", "rows", "factor"),
    [("cifar10", "5", 0.2), ("imagenet", "3", 0.1)],  # of 25 images, and of 16: 5 updates in an epoch
    ids=["cifar10", "imagenet"],
)
def test_the_schedules_are_counted_in_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: str, factor: float
) -> None:
    file, variables, write, rate = JOBS[name]
    write(tmp_path / "data")
    for variable, value in {"DATA": str(tmp_path / "data"), **variables, "ROWS": rows}.items():
        monkeypatch.setenv(variable, value)
    job = load_job(FOLDER / file, 0)
    assert job.scheduler is not None
    optimizer = job.optimizer(list(job.model.named_parameters()))
    scheduler, rates = job.scheduler(optimizer), []
    for _ in range(5 * 100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    changes = [n for n in range(1, len(rates)) if rates[n] != rates[n - 1]]
    assert changes == [5 * 30, 5 * 60, 5 * 90]
    assert rates[-1] == pytest.approx(rate * factor**3)


def test_a_network_of_full_size_runs_in_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_imdb(tmp_path / "data")
    for variable, value in {"DATA": str(tmp_path / "data"), "ROWS": "2", "LENGTH": "3"}.items():
        monkeypatch.setenv(variable, value)
    job = load_job(FOLDER / "pipeoptim/jobs/imdb.py", 0)
    plan = roundelay.plan(job, workers=4, rule="pipeoptim", predictor="paper", backward="recompute", cuts="equal")
    trained = roundelay.train(job, plan=plan, epochs=2)
    assert len(trained.updates) == 2
    assert trained.evaluations[-1].metrics["accuracy"] in (0.0, 0.5, 1.0)
