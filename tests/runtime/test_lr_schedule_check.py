"""Schedules and optimizers that are others when they are made again are refused; all of torch's are not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LambdaLR

import roundelay
from roundelay.errors import JobError
from roundelay.guards.lr_schedule_check import check_reproducible
from tests.api.jobs import make

Make = Callable[[torch.optim.Optimizer], Any]


def sgd(named: Any) -> torch.optim.Optimizer:
    """With momentum, which some schedules change."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def counting() -> Make:
    """A function that counts its calls, and not before the fortieth says so."""
    calls = itertools.count()
    return lambda optimizer: LambdaLR(optimizer, lambda update: 0.5 if next(calls) > 40 else 1.0)


def drawing() -> Make:
    """Noise."""
    return lambda optimizer: LambdaLR(optimizer, lambda update: random.random())


class Kept(schedulers.LRScheduler):
    """Counts in a list that all objects share."""

    calls: list[int] = []  # noqa: RUF012

    def get_lr(self) -> list[float]:
        """One rate for each group."""
        self.calls.append(1)
        return [0.1 / len(self.calls) for _ in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (counting(), rf"LambdaLR with `<lambda>` at {__file__}:\d+: got lr 0.05 at update 0, .* before had lr 0.1"),
        (drawing(), r"LambdaLR with `<lambda>`"),
        (Kept, rf"Kept with `get_lr` at {__file__}:\d+"),
    ],
)
def test_a_schedule_with_state_outside_is_refused_by_name(schedule: Make, told: str) -> None:
    with pytest.raises(JobError, match=told) as error:
        roundelay.capture(make(optimizer=sgd, scheduler=schedule))
    assert "creates at each call" in error.value.remedy


@pytest.mark.parametrize("what", ["lr", "groups"])
def test_an_optimizer_that_is_another_at_its_second_call_is_refused(what: str) -> None:
    calls = itertools.count(1)

    def made(named: Any) -> torch.optim.Optimizer:
        number = next(calls)
        groups = [{"params": [p]} for _, p in named[:number]] if what == "groups" else [p for _, p in named]
        return torch.optim.SGD(groups, lr=0.1 / (number if what == "lr" else 1))

    with pytest.raises(JobError, match=rf"Job\(optimizer=...\), `made` at {__file__}:\d+: got") as error:
        check_reproducible(make(optimizer=made, scheduler=None))
    assert ("2 parameter groups, and 1" if what == "groups" else "lr = 0.05 in group 0, and 0.1") in error.value.got


OURS: dict[str, Make] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda u: 0.9**u),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda u: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o), schedulers.StepLR(o, 2)]),
    "memory of its own": lambda o: LambdaLR(o, (lambda seen: lambda u: seen.setdefault(u, 0.9**u))({})),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("tensor", [False, True])
def test_no_innocent_schedule_is_refused(name: str, tensor: bool) -> None:
    rate = torch.tensor(0.1) if tensor else 0.1

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=rate, momentum=0.9, foreach=True if tensor else None)

    check_reproducible(make(nn.Linear(2, 2), optimizer=optimizer, scheduler=OURS[name]))


HELD: dict[str, Any] = {}


def held(named: Any) -> torch.optim.Optimizer:
    """The person's code keeps what it made."""
    HELD["optimizer"] = torch.optim.SGD(named, lr=0.1)
    return HELD["optimizer"]


def lowered(by: float) -> None:
    """By hand."""
    for group in HELD["optimizer"].param_groups:
        group["lr"] *= by


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("where", ["batches", "evaluate", "nowhere"])
def test_a_rate_that_is_changed_by_hand_is_refused_by_name(where: str, transport: str) -> None:
    data = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]

    def batches(epoch: int) -> Any:
        if epoch and where == "batches":
            lowered(0.5)
        return data

    def evaluate(model: Any) -> dict[str, float]:
        if where == "evaluate":
            lowered(0.5)
        return {"loss": 0.0}

    job = make(optimizer=held, scheduler=None, batches=batches, evaluate=evaluate)
    plan = roundelay.plan(job, workers=2, rule="1f1b", transport=transport)
    if where == "nowhere":
        assert len(roundelay.train(job, plan=plan, epochs=3).updates) == 9
        return
    with pytest.raises(JobError, match=r"param_groups\[0\]\['lr'\], changed by the job while it trains") as error:
        roundelay.train(job, plan=plan, epochs=8)
    assert "Job(scheduler=...)" in error.value.remedy
