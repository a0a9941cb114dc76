"""What an optimizer function does to parameters beside making an optimizer of them is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.errors import JobError
from roundelay.runtime.optimizer.optimizer_side_effects import source_location
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer
from tests.api.jobs import make

Named = list[tuple[str, nn.Parameter]]


def hook(named: Named) -> None:
    named[1][1].register_hook(lambda grad: grad * 2)


def behind(named: Named) -> None:
    for _, p in named:
        p.register_post_accumulate_grad_hook(stepped)


def stepped(p: torch.Tensor) -> None:
    """Optimizer in backward."""


def flat(named: Named) -> None:
    named[1][1].grad = torch.zeros(10)[:3]


def frozen(named: Named) -> None:
    named[1][1].requires_grad_(False)


def moved(named: Named) -> None:
    named[1][1].data = torch.zeros(10)[:3]


def filled(named: Named) -> None:
    with torch.no_grad():
        named[1][1].fill_(0.5)


REFUSED: dict[str, tuple[Callable[[Named], None], str, str]] = {
    "hook": (hook, rf"'bias': got a gradient hook, `<lambda>` at {__file__}:\d+", "a subclass whose step"),
    "behind": (behind, rf"'weight': got a hook that .* accumulated, `stepped` at {__file__}:\d+", "one optimizer over"),
    "gradient": (flat, "'bias': got a gradient that the function has set", "Do not set p.grad"),
    "frozen": (frozen, "'bias': got requires_grad = False", r"Freeze parameters in job()"),
    "memory": (moved, "'bias': got other values or another memory", "Change weights in job()"),
    "values": (filled, "'bias': got other values or another memory", "Change weights in job()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    act, told, remedy = REFUSED[name]

    def made(named: Named) -> torch.optim.Optimizer:
        act(named)
        return torch.optim.SGD(named, lr=0.1)

    with pytest.raises(JobError, match=told) as error:
        build_optimizer(made, list(nn.Linear(2, 3).named_parameters()))
    assert remedy in error.value.remedy


def test_what_was_there_before_is_not_the_function_s() -> None:
    layer = nn.Linear(2, 3)
    layer.weight.register_hook(lambda grad: grad)
    layer.bias.grad = torch.zeros(3)
    layer.bias.requires_grad_(False)
    assert build_optimizer(lambda named: torch.optim.SGD(named, lr=0.1), list(layer.named_parameters()))


def test_a_job_is_refused_when_it_is_captured() -> None:
    def made(named: Named) -> torch.optim.Optimizer:
        named[0][1].register_hook(lambda grad: grad)
        return torch.optim.SGD(named, lr=0.1)

    with pytest.raises(JobError, match=r"parameter '0\.weight': got a gradient hook"):
        roundelay.capture(make(optimizer=made, scheduler=None))


class Called:
    """An object that is called."""

    def __call__(self, grad: Any) -> Any:
        """As it is."""
        return grad

    def method(self, grad: Any) -> Any:
        """As it is."""
        return grad


def test_functions_of_every_kind_have_a_place() -> None:
    for function, name in ((stepped, "stepped"), (functools.partial(stepped), "stepped"), (Called().method, "method"),
                           (functools.partial(Called()), "__call__"), (Called(), "__call__")):  # fmt: skip
        assert source_location(function).startswith(f"`{name}` at {__file__}:")
    assert source_location(torch.relu) == "`relu`"


def test_learning_rates_are_tensors_of_their_own() -> None:
    rate = torch.tensor(0.5)
    named = list(nn.Linear(2, 3).named_parameters())
    optimizer = build_optimizer(lambda named: torch.optim.SGD(named, lr=rate, foreach=True), named)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert rate.item() == 0.5
