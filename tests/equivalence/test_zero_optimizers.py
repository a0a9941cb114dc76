"""ZeRO-1 with optimizers of a person's own: what may be split is, the rest is left whole or refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundelay
from roundelay.errors import PlanError

ZERO: dict[str, Any] = {"workers": 1, "data_parallel": 2, "zero": 1, "micro_batches": 2}
Make = Callable[[Any], torch.optim.Optimizer]


def job(optimizer: Make) -> roundelay.Job:
    """Layers of 17 and 18, so that halves are uneven."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 6, generator=draws), torch.randint(3, (8,), generator=draws)) for _ in range(6)]
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 18)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=optimizer,
    )


class Lookahead(torch.optim.Optimizer):
    """Shares the groups of what it wraps, and keeps slow weights in that one's state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state: Any = defaultdict(dict)
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            group["turn"] = group.get("turn", 0) + 1
            for p in group["params"] if group["turn"] % 2 == 0 else ():
                slow = self.base.state[p].setdefault("slow", p.detach().clone())
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class Own(torch.optim.Optimizer):
    """One of a person's own, whose state is a list of past gradients, or a number a row."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self._kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if self._kind == "list":
                past = state.get("past", [torch.zeros_like(p), torch.zeros_like(p)])
                state["past"] = [past[1], p.grad.clone()]
                p.sub_(p.grad + past[0], alpha=0.05)
            else:
                squares = p.grad.square().mean(1) if p.ndim > 1 else p.grad.square()
                state["rows"] = state.get("rows", torch.zeros(p.shape[0])) + squares
                p.sub_(p.grad / (state["rows"].sqrt() + 1e-3).view(-1, *[1] * (p.ndim - 1)), alpha=0.05)


MAKES: dict[str, Make] = {
    "wrapped": lambda given: Lookahead(torch.optim.Adam([p for _, p in given], lr=1e-2)),
    "list": lambda given: Own([p for _, p in given], "list"),
    "rows": lambda given: Own([p for _, p in given], "rows"),
}


@pytest.mark.parametrize("name", MAKES)
def test_the_run_equals_its_reference_and_plain_pytorch(name: str) -> None:
    assert roundelay.verify(job(MAKES[name]), steps=5, **ZERO).equal


@pytest.mark.parametrize("name", MAKES)
def test_a_continued_run_has_the_weights_of_a_straight_one(name: str, tmp_path: Path) -> None:
    straight, second = job(MAKES[name]), job(MAKES[name])
    roundelay.train(straight, steps=6, **ZERO)
    roundelay.train(job(MAKES[name]), steps=3, save_to=tmp_path / "first", **ZERO)
    roundelay.train(second, steps=3, resume=tmp_path / "first", **ZERO)
    for one, other in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_states_that_need_whole_tensors_are_left_whole_and_named() -> None:
    made = job(MAKES["rows"])
    planned = roundelay.plan(made, **ZERO)
    assert set(planned.states) == {"*.bias"}
    with pytest.raises(PlanError, match=r"--zero 1: got an optimizer with a step that applies .*norm"):
        roundelay.plan(job(lambda given: Scaled([p for _, p in given], lr=0.1)), **ZERO)


class Scaled(torch.optim.SGD):
    """Each gradient over its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.div_(p.grad.norm())
        return super().step()
