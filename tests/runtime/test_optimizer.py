"""Learning rates ahead: the same whichever way they are asked for, and at no cost in memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from roundelay.runtime.optimizer import RateTable


def table(named: list[tuple[str, torch.nn.Parameter]]) -> RateTable:
    """Two groups under an optimizer that makes its state at once, and a scheduler."""
    return RateTable(
        lambda named: torch.optim.Adagrad([{"params": [p], "lr": float(i + 1)} for i, (_, p) in enumerate(named)]),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        named,
    )


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.zeros(3))) for name in "ab"]


def test_rates_of_all_groups_and_of_one_are_the_same() -> None:
    made = table(parameters())
    assert made.at(3) == (pytest.approx(1 / 8), pytest.approx(2 / 8))
    assert made.rates(1, 2, 3) == tuple(made.at(update)[1] for update in (2, 3, 4))
    assert made.at(0) == (1.0, 2.0)


def test_neither_weights_nor_state_are_held() -> None:
    named = parameters()
    held = [weakref.ref(parameter) for _, parameter in named]
    made = table(named)
    named.clear()
    gc.collect()
    assert [one() for one in held] == [None, None]
    assert made.at(1) == (0.5, 1.0)
