"""Hooks on parameters that only look at gradients are called as in plain PyTorch; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundelay
from roundelay.errors import CaptureError, JobError, PlanError

DATA = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(3)]


def model_with(hook: Callable[[str, torch.Tensor], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: hook(name, gradient))
    return model


def job(model: nn.Module) -> roundelay.Job:
    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: DATA,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


class Log:
    """Keeps the norm of every gradient."""

    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {}

    def __call__(self, name: str, gradient: torch.Tensor) -> None:
        self.norms.setdefault(name, []).append(float(gradient.norm()))


@pytest.mark.parametrize("choices", [{"workers": 2}, {"workers": 1, "data_parallel": 2}])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_logger_sees_each_batch_s_gradients_once(choices: dict[str, Any], parts: int) -> None:
    ours, plain = Log(), Log()
    roundelay.train(job(model_with(ours)), steps=3, micro_batches=parts * choices.get("data_parallel", 1), **choices)
    model = model_with(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, labels in DATA:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    assert ours.norms.keys() == plain.norms.keys()
    for name, norms in plain.norms.items():
        assert ours.norms[name] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    "hook", [lambda name, gradient: gradient * 2, lambda name, gradient: gradient.mul_(2) and None]
)
def test_one_that_changes_gradients_is_refused(hook: Any) -> None:
    with pytest.raises(CaptureError, match=r"parameter '0.weight': got a hook on its gradient"):
        roundelay.plan(job(model_with(hook)), workers=2)


def test_one_that_begins_to_change_them_is_refused() -> None:
    calls = [0]

    def later(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        calls[0] += 1
        return gradient * 2 if calls[0] > 6 else None

    with pytest.raises(JobError, match="a hook on its gradient that changes it"):
        roundelay.train(job(model_with(later)), steps=3, workers=2, micro_batches=1, check="off")


def test_trials_leave_no_trace() -> None:
    log = Log()
    roundelay.plan(job(model_with(log)), workers=2)
    assert log.norms == {}


@pytest.mark.parametrize("choices", [{"data_parallel": 2, "zero": 1}, {"tensor_parallel": 2}])
def test_parts_of_gradients_are_not_shown(choices: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="a hook on its gradient, of which each holder has a part"):
        roundelay.train(job(model_with(Log())), steps=1, workers=1, **choices)
