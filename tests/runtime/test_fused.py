"""Fused optimizers: a person may ask for one, and a stage's share of it computes what the whole one does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from roundelay.planning.planning import capture, plan
from roundelay.proof.run_vs_reference import verify_session
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, narrow
from roundelay.session.training import Length, Session
from tests.api.jobs import make

#: Sizes around the width of a vector, and none that is a multiple of it only.
SIZES = (1, 3, 7, 8, 9, 16, 17, 31, 33, 64, 255, 1000, 4097)

KINDS: dict[str, Any] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD, Nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "Adam": partial(Adam, lr=2e-3, amsgrad=True),
    "AdamW": partial(AdamW, lr=2e-3, weight_decay=0.1),
}


def weights() -> list[tuple[str, torch.nn.Parameter]]:
    """The same ones at every call."""
    draws = torch.Generator().manual_seed(0)
    return [(str(n), torch.nn.Parameter(torch.randn(n, generator=draws))) for n in SIZES]


def stepped(kind: Any, kept: slice = slice(None), **how: Any) -> list[torch.Tensor]:
    """Weights after twenty steps of an optimizer over all of them, narrowed to those that are kept."""
    named = weights()
    optimizer = build_optimizer(partial(kind, **how), named)
    narrow(optimizer, dict(named[kept]), named)
    draws = torch.Generator().manual_seed(1)
    for _ in range(20):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        optimizer.step()
    return [parameter.detach() for _, parameter in named[kept]]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_optimizer_narrowed_to_a_stage_keeps_the_bits_of_the_whole_one(kind: Any, how: dict[str, bool]) -> None:
    part = slice(2, 11, 3)
    assert same(stepped(kind, part, **how), stepped(kind, **how)[part])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_fused_steps_have_other_last_bits_so_only_the_person_may_choose_them(kind: Any) -> None:
    plain, fused = stepped(kind), stepped(kind, fused=True)
    assert same(plain, stepped(kind, foreach=True))
    assert not same(plain, fused)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, fused, strict=True))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rule", ["pipedream", "pipeoptim"])
def test_a_run_with_a_fused_optimizer_equals_its_reference(kind: Any, rule: str) -> None:
    def fused(named: list[tuple[str, torch.nn.Parameter]]) -> Optimizer:
        made: Optimizer = kind(named, fused=True)
        return made

    job = make(optimizer=fused)
    captured = capture(job)
    session = Session(job, captured, plan(job, workers=2, rule=rule, captured=captured), 0, Length(steps=6))
    result = verify_session(session)
    assert result.equal, result.difference
