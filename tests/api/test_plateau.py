"""A learning rate that waits for what evaluations say: as plain PyTorch has it, proved, resumed, refused in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import JobError, UserCodeError
from roundelay.job import Job
from roundelay.runtime import optimizer_steps
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.session.training import Trained
from tests.api.jobs import make

SAID = [1.0, 1.0, 1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1]
RATES = [0.1, 0.1, 0.05, 0.025, 0.025, 0.0125, 0.00625]
"""Of each epoch, by hand: halved behind every epoch that is no better than the best before."""


def small() -> torch.nn.Module:
    """The same weights each time."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 9), torch.nn.Linear(9, 3))


def says(numbers: Sequence[float]) -> Callable[[torch.nn.Module], dict[str, float]]:
    """An evaluation that says these, one after the other."""
    said = iter(numbers)
    return lambda model: {"loss": next(said)}


def job(**changes: Any) -> Job:
    """Evaluations that say what is written above, whatever was learned."""
    fields: dict[str, Any] = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        "scheduler": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        "evaluate": says(SAID),
    }
    return make(small(), **(fields | changes))


def planned(rule: str, transport: str = "memory", **more: Any) -> roundelay.Plan:
    """A plan for two workers."""
    return roundelay.plan(job(), workers=2, rule=rule, transport=transport, cuts="equal", **more)


def rates(trained: Trained) -> list[float]:
    """The learning rate of every epoch."""
    return [
        u.learning_rates[0]
        for u, v in zip(trained.updates, [None, *trained.updates], strict=False)
        if v is None or u.epoch != v.epoch
    ]


def test_it_is_what_plain_pytorch_does_bit_for_bit() -> None:
    plain, ours = job(), job()
    optimizer = plain.optimizer(list(plain.model.named_parameters()))
    assert plain.scheduler is not None
    assert plain.evaluate is not None
    scheduler: Any = plain.scheduler(optimizer)
    for epoch in range(5):
        for batch in read_batches(plain.batches, 0, Extent(start_epoch=epoch, epochs=epoch + 1)):
            plain.loss(plain.model(batch[0]), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(plain.evaluate(plain.model)["loss"])
    trained = roundelay.train(ours, plan=planned("1f1b", micro_batches=1), epochs=5)
    assert rates(trained) == RATES[:5]
    assert trained.numbers == tuple(SAID[:5])
    for name, weight in plain.model.named_parameters():
        assert torch.equal(trained.snapshot.parameters[name], weight.detach()), name
    assert [found.metrics["loss"] for found in trained.evaluations] == SAID[:5]


@pytest.mark.parametrize(
    ("rule", "transport"),
    [("1f1b", "gloo"), ("pipeoptim", "memory"), ("pipedream", "shm"), ("zb-v", "memory"), ("spectrain", "shm")],
)
def test_it_is_proved(rule: str, transport: str) -> None:
    result = roundelay.verify(job(), plan=planned(rule, transport, ema=0.9), epochs=3)
    assert result.equal, result.difference


def test_a_rate_that_the_reference_does_not_follow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(optimizer_steps, "per_update_scheduler", lambda scheduler, numbers: None)
    result = roundelay.verify(job(), plan=planned("1f1b"), epochs=4)
    assert not result.equal


@pytest.mark.parametrize("rule", ["1f1b", "pipeoptim"])
def test_a_run_goes_on_with_the_numbers_that_were_said(rule: str, tmp_path: Path) -> None:
    plan = planned(rule)
    whole = roundelay.train(job(), plan=plan, epochs=6)
    first = job()
    roundelay.train(first, plan=plan, epochs=3, save_to=tmp_path / "a")
    assert load(tmp_path / "a").numbers == tuple(SAID[:3])
    rest = job(evaluate=says(SAID[3:]))
    trained = roundelay.train(rest, plan=plan, epochs=6, resume=tmp_path / "a")
    assert rates(trained) == RATES[3:6]
    for name, weight in whole.snapshot.parameters.items():
        assert torch.equal(trained.snapshot.parameters[name], weight), name
    again = job(evaluate=says(SAID[3:]))
    assert roundelay.verify(again, plan=plan, epochs=5, resume=tmp_path / "a").equal


def test_so_many_updates_may_end_within_an_epoch() -> None:
    per_epoch = len(list(read_batches(job().batches, 0, Extent(epochs=1))))
    trained = roundelay.train(job(), plan=planned("pipeoptim"), steps=2 * per_epoch + 1)
    assert len(trained.updates) == 2 * per_epoch + 1
    assert rates(trained) == RATES[:3]
    assert trained.numbers == tuple(SAID[:2])


def test_an_evaluation_may_end_it() -> None:
    said = iter(SAID)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        number = next(said)
        if number < 1.0:
            raise roundelay.StopTraining("good enough", {"loss": number})
        return {"loss": number}

    trained = roundelay.train(job(evaluate=evaluate), plan=planned("1f1b"), epochs=50)
    assert trained.stopped == "good enough"
    assert trained.updates[-1].epoch <= 4


def test_an_evaluation_may_end_it_without_the_number() -> None:
    said = iter(SAID)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        number = next(said)
        if number < 1.0:
            raise roundelay.StopTraining("good enough")
        return {"loss": number}

    trained = roundelay.train(job(evaluate=evaluate), plan=planned("1f1b"), epochs=50)
    assert trained.stopped == "good enough"
    assert all(number >= 1.0 for number in trained.numbers)


@pytest.mark.parametrize(
    ("evaluate", "monitor", "number"),
    [
        (lambda model: {"accuracy": 0.5}, None, 0.5),
        (lambda model: {"accuracy": 0.5, "loss": 2.0}, None, 2.0),
        (lambda model: {"accuracy": 0.5, "loss": 2.0}, "accuracy", 0.5),
    ],
)
def test_the_number_is_the_one_named_the_only_one_or_the_loss(
    evaluate: Any, monitor: str | None, number: float
) -> None:
    trained = roundelay.train(job(evaluate=evaluate, monitor=monitor), plan=planned("1f1b"), epochs=1)
    assert trained.numbers == (number,)


@pytest.mark.parametrize(("said", "monitor"), [({"a": 1.0, "b": 2.0}, None), ({"a": 1.0}, "b"), ({}, None)])
def test_a_number_that_is_not_said_is_told(said: dict[str, float], monitor: str | None) -> None:
    with pytest.raises(UserCodeError, match="with a ReduceLROnPlateau"):
        roundelay.train(job(evaluate=lambda model: said, monitor=monitor), plan=planned("1f1b"), epochs=2)


def test_nothing_to_wait_for_is_refused_before_the_run() -> None:
    with pytest.raises(JobError, match=r"no Job\(evaluate"):
        roundelay.train(job(evaluate=None), plan=planned("1f1b"), epochs=2)
