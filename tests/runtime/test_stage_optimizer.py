"""Learning rates ahead: the same whichever way they are asked for, and at no cost in memory."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from roundelay.errors import JobError
from roundelay.runtime.optimizer.stage_optimizer import RateTable, build_optimizer, choose_alike, without_gradients


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


class Demanding(torch.optim.SGD):
    """Its step asks for gradients."""

    def step(self, closure: Any = None) -> None:
        """Refuse."""
        raise AssertionError("a step without gradients")


def test_a_step_that_fails_without_gradients_is_refused_beside_a_scheduler() -> None:
    halved = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    with pytest.raises(JobError, match="Demanding, with a scheduler: got AssertionError in a step without gradients"):
        RateTable(partial(Demanding, lr=1.0), halved, parameters()).at(1)
    assert RateTable(partial(Demanding, lr=1.0), None, parameters()).at(1) == (1.0,)


@pytest.mark.parametrize("rate", [None, "fast"])
def test_a_rate_that_is_no_number_is_refused(rate: Any) -> None:
    def make(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made = torch.optim.SGD(named, lr=0.1)
        made.param_groups[0]["lr"] = rate
        return made

    with pytest.raises(JobError, match=f"SGD: got a parameter group with lr = {rate!r}"):
        RateTable(make, None, parameters())


def test_a_stage_s_optimizer_of_the_whole_model_s_parameters_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    copies = without_gradients(model)
    with pytest.raises(JobError, match="not given"):
        build_optimizer(lambda named: torch.optim.SGD(model.parameters(), lr=0.1), copies)
    assert build_optimizer(lambda named: torch.optim.SGD(named, lr=0.1), copies)
    assert build_optimizer(lambda named: torch.optim.SGD(named[:1], lr=0.1), copies)


@pytest.mark.parametrize(
    ("devices", "options", "chosen"),
    [
        (("cpu", "cuda:0"), {}, False),
        (("cuda:0", "cuda:1"), {}, None),
        (("cpu", "cpu"), {}, None),
        (("cpu", "cuda:0"), {"foreach": True}, True),
        (("cpu", "cuda:0"), {"fused": True}, None),
    ],
    ids=str,
)
def test_where_stages_lie_on_devices_of_different_kinds_torch_does_not_choose(
    devices: tuple[str, ...], options: dict[str, Any], chosen: bool | None
) -> None:
    """It would update many parameters in one call on the one, and one by one on the other; a person's choice stays."""
    optimizer = torch.optim.AdamW(parameters(), lr=0.1, **options)
    choose_alike(optimizer, devices)
    assert optimizer.param_groups[0]["foreach"] is chosen
