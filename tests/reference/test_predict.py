"""Predictions against numbers worked out by hand, and against torch's own optimizers with zero gradients.

The hand's numbers: W = 1, s = 2, r = .1, .3; SGD's v = 2, the last gradient 4, the last displacement .3 at the rate .2;
Adam's m = 2 over a denominator of 1 (2 with amsgrad).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from roundelay.reference.predict import Ahead, Past, predict

SGDM = {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.0, "nesterov": False, "maximize": False}
NESTEROV = {**SGDM, "nesterov": True, "dampening": 0.0}
PLAIN = {**SGDM, "momentum": 0.0, "weight_decay": 0.5}
ADAM = {"betas": (0.5, 0.75), "eps": 0.5, "weight_decay": 0.0, "amsgrad": False}
DECAYED = {**ADAM, "weight_decay": 0.5, "decoupled_weight_decay": True}


def past(kind: type[torch.optim.Optimizer], group: dict[str, Any], **changes: Any) -> Past:
    one = {"exp_avg": 2.0, "exp_avg_sq": 0.0625, "max_exp_avg_sq": 0.5625, "step": 1.0}
    numbers = one if issubclass(kind, Adam) else {"momentum_buffer": 2.0} if group.get("momentum") else {}
    made = {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
    four, third = torch.tensor([4.0], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    known = {"state": made, "updated": True, "gradient": four, "displacement": third, "last_rate": 0.2}
    return Past(kind, group, **{**known, **changes})


AHEAD = Ahead(2, lambda i: (0.1, 0.3)[i - 1])
CASES = [
    (SGD, SGDM, (1 - 0.125 * 2, 0.6, 1 - 0.2 * 4)),
    (SGD, NESTEROV, (1 - 0.0625 * 2, 0.9, 1 - 0.2 * 5)),
    (SGD, PLAIN, (0.95 * 0.85, 0.7, 0.2)),
    (SGD, {**PLAIN, "weight_decay": 0.0, "maximize": True}, (1.0, 0.7, 1.8)),
    (Adam, ADAM, (0.6952380952380952, 0.2, 0.2)),
    (Adam, {**ADAM, "weight_decay": 0.5}, (0.6952380952380952, 0.2, 0.2)),
    (Adam, {**ADAM, "amsgrad": True}, (0.8476190476190476, 0.6, 0.6)),
    (Adam, DECAYED, (0.5227380952380952, 0.1, 0.2)),
    (AdamW, DECAYED, (0.5227380952380952, 0.1, 0.2)),
    (RMSprop, {}, (0.4, 0.7, 0.7)),
]


@pytest.mark.parametrize(("kind", "group", "expected"), CASES)
def test_each_prediction_is_the_number_worked_out_by_hand(kind: Any, group: Any, expected: Any) -> None:
    weight = torch.ones(1, dtype=torch.float64)
    got = [predict(name, weight, past(kind, group), AHEAD).item() for name in ("improved", "paper", "released-code")]
    assert got == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("kind", "group"), [case[:2] for case in CASES])
@pytest.mark.parametrize("predictor", ["improved", "paper", "released-code"])
def test_a_parameter_without_an_update_or_a_distance_stays(kind: Any, group: Any, predictor: str) -> None:
    weight, known = torch.ones(1, dtype=torch.float64), past(kind, group)
    assert predict(predictor, weight, known, Ahead(0, AHEAD.rate)) is weight
    assert predict(predictor, weight, past(kind, group, updated=False), AHEAD) is weight
    bare = past(kind, group, state={}, gradient=None, displacement=None)
    assert group == PLAIN or predict(predictor, weight, bare, AHEAD) is weight


def test_a_rate_of_zero_leaves_no_direction() -> None:
    weight = torch.ones(1, dtype=torch.float64)
    assert predict("paper", weight, past(RMSprop, {}, last_rate=0.0), AHEAD) is weight


@given(
    st.sampled_from([(0.9, 0.0, False), (0.9, 0.3, False), (0.8, 0.0, True), (0.0, 0.0, False)]),
    st.floats(0.0, 0.5), st.integers(1, 5),
)  # fmt: skip
def test_improved_sgd_is_what_zero_gradients_do(kind: tuple[float, float, bool], decay: float, distance: int) -> None:
    mu, tau, nesterov = kind
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    optimizer = SGD([weight], lr=0.1, momentum=mu, dampening=tau, weight_decay=decay, nesterov=nesterov)
    for gradient in ([1.0, 2.0, -3.0], [0.5, -1.0, 1.0]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    state = {name: value.clone() for name, value in optimizer.state[weight].items()}
    known = past(SGD, {"maximize": False, **optimizer.param_groups[0]}, state=state)
    got = predict("improved", weight.detach().clone(), known, Ahead(distance, lambda i: 0.1 * i))
    for i in range(1, distance + 1):
        weight.grad = torch.zeros_like(weight)
        optimizer.param_groups[0]["lr"] = 0.1 * i
        optimizer.step()
    torch.testing.assert_close(got, weight.detach(), rtol=1e-13, atol=1e-13)


def test_the_last_bit_is_that_of_the_fixed_operations() -> None:
    """In single precision ``W - b * v`` and a coefficient summed in another order come out differently."""
    torch.manual_seed(0)
    weight, v, second = torch.randn(4096), torch.randn(4096), torch.rand(4096)
    sgdm = past(SGD, {**SGDM, "momentum": 0.9}, state={"momentum_buffer": v})
    got = predict("improved", weight, sgdm, Ahead(3, lambda i: 0.1))
    assert torch.equal(got, torch.add(weight, v, alpha=-(0.1 * 0.9 + 0.1 * (0.9 * 0.9) + 0.1 * (0.9 * 0.9 * 0.9))))
    assert not torch.equal(got, weight - (0.1 * 0.9 + 0.1 * (0.9 * 0.9) + 0.1 * (0.9 * 0.9 * 0.9)) * v)
    state = {"exp_avg": v, "exp_avg_sq": second, "step": torch.tensor(3.0)}
    adamw = past(AdamW, {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}, state=state)
    c = (1 - 0.99**3) ** 0.5
    denominator = second.sqrt().add_(1e-8 * c)
    expected = torch.mul(weight, 1 - 2 * 0.1 * 0.1).addcdiv_(v, denominator, value=-(2 * 0.1 / (1 - 0.9**3) * c))
    assert torch.equal(predict("paper", weight, adamw, Ahead(2, lambda i: 0.1)), expected)


@pytest.mark.parametrize("predictor", ["improved", "paper", "released-code"])
def test_adam_takes_a_complex_parameter_for_pairs(predictor: str) -> None:
    pairs, m, second = torch.randn(5, 2), torch.randn(5, 2), torch.rand(5, 2)
    state = {"exp_avg": m, "exp_avg_sq": second, "step": torch.tensor(1.0)}
    folded = {n: torch.view_as_complex(v) if v.ndim else v for n, v in state.items()}
    group = {**DECAYED, "eps": 1e-8}
    expected = predict(predictor, pairs, past(Adam, group, state=state), AHEAD)
    got = predict(predictor, torch.view_as_complex(pairs), past(Adam, group, state=folded), AHEAD)
    assert torch.equal(torch.view_as_real(got), expected)
