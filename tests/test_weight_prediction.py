"""Weight prediction is held to three things that share no code with it: torch's own optimizers stepping with zero
gradients, the literal tensor operations of the statement (equal bits), and numbers worked out by hand."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from roundelay.errors import InternalError, UsageError
from roundelay.weight_prediction import PREDICTORS, LastStep, Outlook, needs_displacement, needs_gradient, predict

Make = Callable[[list[Parameter]], Optimizer]

SCHEDULE = (0.05, 0.04, 0.07, 0.01, 0.03)
RATE = 0.05


def trained(
    make: Make, *, updates: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Optimizer, Parameter, LastStep]:
    """An optimizer after some updates at a random weight, with the record of its last update."""
    source = torch.Generator().manual_seed(7)
    weight = Parameter(torch.randn(3, 5, generator=source, dtype=dtype))
    optimizer = make([weight])
    before = weight.detach().clone()
    for _ in range(updates):
        before = weight.detach().clone()
        weight.grad = torch.randn(3, 5, generator=source, dtype=dtype)
        optimizer.step()
    assert weight.grad is not None
    rate = float(optimizer.param_groups[0]["lr"])
    return optimizer, weight, LastStep(rate, before - weight.detach(), weight.grad.clone())


def ahead(
    optimizer: Optimizer, weight: Parameter, rates: tuple[float, ...], last: LastStep | None, setting: str = "improved"
) -> Tensor:
    group = optimizer.param_groups[0]
    return predict(optimizer, group, weight, setting=setting, outlook=Outlook(rates), last=last)


def coasted(optimizer: Optimizer, rates: tuple[float, ...], *, hold: bool = False) -> Tensor:
    """The weight after torch itself has stepped a copy with zero gradients; ``hold`` keeps v-hat where it was."""
    copied = copy.deepcopy(optimizer)
    group = copied.param_groups[0]
    (weight,) = group["params"]
    kept = copy.deepcopy(copied.state[weight])
    for rate in rates:
        weight.grad = torch.zeros_like(weight)
        group["lr"] = rate
        if hold:
            hold_second_moment(copied.state[weight], kept, group["betas"][1])
        copied.step()
    return Tensor(weight.detach())


def hold_second_moment(state: dict[str, Any], kept: dict[str, Any], beta2: float) -> None:
    """Set the second moment so that the coming step's decay and bias correction lead back to the kept v-hat."""
    grown = (1 - beta2 ** (float(state["step"]) + 1)) / (1 - beta2 ** float(kept["step"]))
    if "max_exp_avg_sq" in kept:
        state["max_exp_avg_sq"].copy_(kept["max_exp_avg_sq"] * grown)
    else:
        state["exp_avg_sq"].copy_(kept["exp_avg_sq"] * grown / beta2)


def sgd(**options: Any) -> Make:
    return lambda weights: SGD(weights, lr=RATE, **options)


def adam(**options: Any) -> Make:
    return lambda weights: Adam(weights, lr=RATE, **options)


def adamw(**options: Any) -> Make:
    return lambda weights: AdamW(weights, lr=RATE, **options)


FAMILIES: dict[str, Make] = {
    "plain": sgd(),
    "plain-decay": sgd(weight_decay=0.3),
    "momentum": sgd(momentum=0.9),
    "nesterov-decay": sgd(momentum=0.9, nesterov=True, weight_decay=0.3),
    "adam": adam(),
    "adamw": adamw(weight_decay=0.3),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=RATE),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=RATE),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=RATE),
    "radam": lambda weights: torch.optim.RAdam(weights, lr=RATE),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=RATE),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_setting = pytest.mark.parametrize("setting", PREDICTORS)


# --- improved is what torch does when every gradient to come is zero ---


@pytest.mark.parametrize("s", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.3},
        {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.3},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.3},
        {"momentum": 0.9, "weight_decay": 0.3, "maximize": True},
        {"momentum": 0.9, "weight_decay": 0.3, "fused": True},
        {"weight_decay": 0.3},
        {"weight_decay": 0.3, "maximize": True},
        {},
    ],
    ids=str,
)
def test_improved_sgd_equals_zero_gradient_steps_of_torch(options: dict[str, Any], s: int) -> None:
    optimizer, weight, last = trained(sgd(**options))
    torch.testing.assert_close(
        ahead(optimizer, weight, SCHEDULE[:s], last), coasted(optimizer, SCHEDULE[:s]), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("s", [1, 2, 5])
@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        adam(),
        adam(betas=(0.8, 0.95), eps=1e-3),
        adam(amsgrad=True, betas=(0.9, 0.5)),
        adam(maximize=True),
        adam(fused=True),
        adamw(weight_decay=0.3),
        adamw(weight_decay=0.3, amsgrad=True, betas=(0.9, 0.5)),
        adamw(weight_decay=0.3, maximize=True),
        adamw(weight_decay=0.0),
        adam(weight_decay=0.3, decoupled_weight_decay=True),
        lambda weights: AdamW(weights, lr=torch.tensor(RATE), weight_decay=0.3),
    ],
)
def test_improved_adam_equals_zero_gradient_steps_of_torch_with_the_second_moment_held(
    make: Make, updates: int, s: int
) -> None:
    optimizer, weight, last = trained(make, updates=updates)
    torch.testing.assert_close(
        ahead(optimizer, weight, SCHEDULE[:s], last), coasted(optimizer, SCHEDULE[:s], hold=True), rtol=0, atol=1e-10
    )


BEGUN = [
    sgd(),
    sgd(weight_decay=0.3, maximize=True),
    sgd(momentum=0.9, dampening=0.4),
    sgd(momentum=0.9, weight_decay=0.3),
    sgd(momentum=0.9, nesterov=True, weight_decay=0.3),
    adam(),
    adam(weight_decay=0.3, maximize=True),
    adam(amsgrad=True, betas=(0.9, 0.5)),
    adamw(weight_decay=0.3, maximize=True),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("updates", [0, 1, 4])
@pytest.mark.parametrize("make", BEGUN)
def test_partial_is_torch_s_own_step_with_the_gradient_begun(make: Make, updates: int, dtype: torch.dtype) -> None:
    optimizer, weight = begun_with(make, updates, dtype)
    gradient = torch.randn(3, 5, dtype=dtype)
    got = rehearsed(optimizer, weight, gradient, (RATE,))
    weight.grad = gradient
    optimizer.step()
    torch.testing.assert_close(got, weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", BEGUN)
def test_partial_goes_on_as_improved_from_where_that_step_led(make: Make) -> None:
    optimizer, weight = begun_with(make, 3, torch.float64)
    gradient = torch.randn(3, 5, dtype=torch.float64)
    optimizer.param_groups[0]["lr"] = SCHEDULE[0]
    got = rehearsed(optimizer, weight, gradient, SCHEDULE)
    weight.grad = gradient
    optimizer.step()
    last = LastStep(SCHEDULE[0], None, None)
    torch.testing.assert_close(got, ahead(optimizer, weight, SCHEDULE[1:], last), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [sgd(momentum=0.9), adam()])
def test_partial_without_a_gradient_is_improved(make: Make) -> None:
    optimizer, weight, last = trained(make)
    assert torch.equal(ahead(optimizer, weight, SCHEDULE, last, "partial"), ahead(optimizer, weight, SCHEDULE, last))


def begun_with(make: Make, updates: int, dtype: torch.dtype) -> tuple[Optimizer, Parameter]:
    """An optimizer after some updates, perhaps none, at a random weight."""
    torch.manual_seed(3)
    weight = Parameter(torch.randn(3, 5, dtype=dtype))
    optimizer = make([weight])
    for _ in range(updates):
        weight.grad = torch.randn(3, 5, dtype=dtype)
        optimizer.step()
    return optimizer, weight


def rehearsed(optimizer: Optimizer, weight: Parameter, gradient: Tensor, rates: tuple[float, ...]) -> Tensor:
    """``partial`` of the weight, whose state must stay as it is."""
    before = copy.deepcopy(optimizer.state[weight]) if weight in optimizer.state else None
    group = optimizer.param_groups[0]
    outlook = Outlook(rates)
    got = predict(optimizer, group, weight, setting="partial", outlook=outlook, last=None, begun=gradient)
    for name, value in (before or {}).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, optimizer.state[weight][name])
    return got


def test_the_literal_zero_gradient_step_of_adam_would_overshoot_by_the_square_root_of_two() -> None:
    optimizer, weight, last = trained(adam(), updates=1)
    ours = ahead(optimizer, weight, (RATE,), last) - weight.detach()
    literal = coasted(optimizer, (RATE,)) - weight.detach()
    torch.testing.assert_close(literal / ours, torch.full_like(ours, math.sqrt(2)), rtol=1e-3, atol=0)


def test_decay_coupled_to_adam_is_left_out_of_the_prediction() -> None:
    optimizer, weight, last = trained(adam(weight_decay=0.3))
    with_decay = ahead(optimizer, weight, SCHEDULE, last)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert torch.equal(with_decay, ahead(optimizer, weight, SCHEDULE, last))


def test_the_order_of_a_changing_schedule_matters() -> None:
    optimizer, weight, last = trained(sgd(momentum=0.9))
    forwards = ahead(optimizer, weight, (0.1, 0.01), last)
    backwards = ahead(optimizer, weight, (0.01, 0.1), last)
    buffer = optimizer.state[weight]["momentum_buffer"]
    torch.testing.assert_close(forwards - backwards, -buffer * 0.09 * (0.9 - 0.81))


# --- numbers worked out by hand ---


@pytest.mark.parametrize(
    ("nesterov", "setting", "reach"),
    [
        (False, "improved", 2.439),  # .9 + .81 + .729
        (True, "improved", 2.1951),  # .81 + .729 + .6561
        (False, "paper", 3.0),
        (True, "paper", 2.43),  # 3 * .9^2
        (False, "released-code", 3.7),  # 3 * (.9 + 1/3): the last gradient is a third of the buffer
    ],
)
def test_three_updates_of_momentum_reach_as_far_as_worked_out(nesterov: bool, setting: str, reach: float) -> None:
    weight = Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = SGD([weight], lr=RATE, momentum=0.9, nesterov=nesterov)
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([3.0], dtype=torch.float64)
    last = LastStep(RATE, None, torch.tensor([1.0], dtype=torch.float64))
    moved = (1.0 - ahead(optimizer, weight, (RATE,) * 3, last, setting)) / (RATE * 3.0)
    assert moved.item() == pytest.approx(reach, rel=1e-12)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        # u = 1, m-hat / sqrt(v-hat) = 1, m = .1: q_1 = .5 * .9 * .1 / (1 - .81), q_2 = .25 * .81 * .1 / (1 - .729)
        ("improved", 8.0 * 0.9 * 0.95 - 0.95 * 0.045 / 0.19 - 0.02025 / 0.271),
        ("paper", 8.0 * 0.8 - 2 * 0.5),
        ("released-code", 8.0 - 2 * 0.5),
    ],
)
def test_two_updates_of_adamw_land_where_worked_out(setting: str, expected: float) -> None:
    weight = Parameter(torch.tensor([8.0], dtype=torch.float64))
    optimizer = AdamW([weight], lr=0.5, weight_decay=0.2, eps=0.0)
    optimizer.state[weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.tensor([0.1], dtype=torch.float64),
        "exp_avg_sq": torch.tensor([0.001], dtype=torch.float64),
    }
    assert ahead(optimizer, weight, (0.5, 0.25), None, setting).item() == pytest.approx(expected, rel=1e-12)


# --- the arithmetic, to the bit, in single precision ---


def assert_same_bits(ours: Tensor, literal: Tensor) -> None:
    assert ours.dtype == literal.dtype == torch.float32
    assert torch.equal(ours.view(torch.int32), literal.view(torch.int32))


@pytest.mark.parametrize("nesterov", [False, True])
def test_improved_momentum_is_one_addition_to_the_bit(nesterov: bool) -> None:
    optimizer, weight, last = trained(sgd(momentum=0.9, nesterov=nesterov), dtype=torch.float32)
    b, c = 0.0, 1.0
    for rate in SCHEDULE:
        c = 0.9 * c
        b = b + rate * ((0.9 * c) if nesterov else c)
    literal = torch.add(weight.detach(), optimizer.state[weight]["momentum_buffer"], alpha=-b)
    assert_same_bits(ahead(optimizer, weight, SCHEDULE, last), literal)


def test_improved_momentum_with_decay_is_a_product_and_an_addition_to_the_bit() -> None:
    optimizer, weight, last = trained(sgd(momentum=0.9, weight_decay=0.3), dtype=torch.float32)
    a, b, c, d = 1.0, 0.0, 1.0, 0.0
    for rate in SCHEDULE:
        c, d = 0.9 * c - 0.3 * b, 0.9 * d + 0.3 * a
        a, b = a - rate * d, b + rate * c
    literal = torch.mul(weight.detach(), a).add_(optimizer.state[weight]["momentum_buffer"], alpha=-b)
    assert_same_bits(ahead(optimizer, weight, SCHEDULE, last), literal)


def test_improved_plain_decay_is_one_product_to_the_bit() -> None:
    optimizer, weight, last = trained(sgd(weight_decay=0.3), dtype=torch.float32)
    a = 1.0
    for rate in SCHEDULE:
        a = a * (1 - rate * 0.3)
    assert_same_bits(ahead(optimizer, weight, SCHEDULE, last), torch.mul(weight.detach(), a))


@pytest.mark.parametrize("setting", ["paper", "released-code"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_linear_momentum_to_the_bit(setting: str, nesterov: bool, maximize: bool) -> None:
    optimizer, weight, last = trained(
        sgd(momentum=0.9, nesterov=nesterov, maximize=maximize, weight_decay=0.3), dtype=torch.float32
    )
    buffer, gradient = optimizer.state[weight]["momentum_buffer"], last.gradient
    assert gradient is not None
    if setting == "released-code":
        consumed = -gradient if maximize else gradient
        literal = torch.add(weight.detach(), torch.mul(buffer, 0.9).add_(consumed, alpha=1 - 0.0), alpha=-(3 * 0.05))
    else:
        literal = torch.add(weight.detach(), buffer, alpha=-(3 * 0.05 * 0.9 * 0.9 if nesterov else 3 * 0.05))
    assert_same_bits(ahead(optimizer, weight, (0.05, 0.9, 0.8), last, setting), literal)


def test_the_released_code_dampens_the_last_gradient() -> None:
    optimizer, weight, last = trained(sgd(momentum=0.9, dampening=0.4), dtype=torch.float32)
    assert last.gradient is not None
    direction = torch.mul(optimizer.state[weight]["momentum_buffer"], 0.9).add_(last.gradient, alpha=1 - 0.4)
    literal = torch.add(weight.detach(), direction, alpha=-(2 * 0.05))
    assert_same_bits(ahead(optimizer, weight, (0.05, 0.05), last, "released-code"), literal)


@pytest.mark.parametrize("maximize", [False, True])
def test_the_released_code_moves_plain_sgd_along_its_last_gradient(maximize: bool) -> None:
    optimizer, weight, last = trained(sgd(maximize=maximize), dtype=torch.float32)
    assert last.gradient is not None
    literal = torch.add(weight.detach(), -last.gradient if maximize else last.gradient, alpha=-(2 * 0.05))
    assert_same_bits(ahead(optimizer, weight, (0.05, 0.05), last, "released-code"), literal)


def test_the_released_code_ignores_a_buffer_left_from_before_momentum_was_switched_off() -> None:
    optimizer, weight, last = trained(sgd(momentum=0.9, dampening=0.4), dtype=torch.float32)
    optimizer.param_groups[0]["momentum"] = 0
    assert last.gradient is not None
    literal = torch.add(weight.detach(), last.gradient, alpha=-0.05)
    assert_same_bits(ahead(optimizer, weight, (0.05,), last, "released-code"), literal)


@every_setting
@pytest.mark.parametrize("lam", [0.0, 0.3])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_to_the_bit(setting: str, lam: float, amsgrad: bool) -> None:
    make = adamw(weight_decay=lam, amsgrad=amsgrad, betas=(0.9, 0.5), eps=1e-6)
    optimizer, weight, last = trained(make, dtype=torch.float32)
    state, s, u = optimizer.state[weight], len(SCHEDULE), 4
    second = state["max_exp_avg_sq"] if amsgrad else state["exp_avg_sq"]
    c = math.sqrt(1 - 0.5**u)
    under = second.sqrt().add_(1e-6 * c)
    if setting in ("improved", "partial"):  # without a gradient begun they are one
        a, b = 1.0, 0.0
        for i in range(1, s + 1):
            q = SCHEDULE[i - 1] * 0.9**i / (1 - 0.9 ** (u + i))
            a = a * (1 - SCHEDULE[i - 1] * lam)
            b = b * (1 - SCHEDULE[i - 1] * lam) + q
    else:
        a = 1.0 - s * SCHEDULE[0] * lam if setting == "paper" else 1.0
        b = s * SCHEDULE[0] / (1 - 0.9**u)
    if a == 1.0:
        literal = torch.addcdiv(weight.detach(), state["exp_avg"], under, value=-(b * c))
    else:
        literal = torch.mul(weight.detach(), a).addcdiv_(state["exp_avg"], under, value=-(b * c))
    assert_same_bits(ahead(optimizer, weight, SCHEDULE, last, setting), literal)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("plain", "paper"),
        *itertools.product(("rmsprop", "adagrad", "nadam", "radam", "adamax"), PREDICTORS),
    ],
)
def test_a_state_without_direction_moves_along_the_last_displacement_to_the_bit(family: str, setting: str) -> None:
    optimizer, weight, last = trained(FAMILIES[family], dtype=torch.float32)
    displacement = last.displacement
    assert displacement is not None
    last = LastStep(0.02, displacement, None)
    factor = sum(SCHEDULE) / 0.02 if setting in ("improved", "partial") else len(SCHEDULE) * SCHEDULE[0] / 0.02
    literal = torch.add(weight.detach(), displacement, alpha=-factor)
    assert_same_bits(ahead(optimizer, weight, SCHEDULE, last, setting), literal)


def test_the_displacement_of_plain_sgd_repeats_its_last_update() -> None:
    optimizer, weight, last = trained(sgd())
    assert last.gradient is not None
    torch.testing.assert_close(
        ahead(optimizer, weight, (RATE, RATE), last, "paper"), weight.detach() - 2 * RATE * last.gradient
    )


# --- identity, purity, what must be kept, refusals ---


def assert_identity(predicted: Tensor, weight: Parameter) -> None:
    assert predicted.data_ptr() == weight.data_ptr()
    assert torch.equal(predicted, weight.detach())
    assert not predicted.requires_grad


@every_family
@every_setting
def test_no_update_ahead_is_the_weight_itself(family: str, setting: str) -> None:
    optimizer, weight, last = trained(FAMILIES[family])
    assert_identity(ahead(optimizer, weight, (), last, setting), weight)


@every_family
@every_setting
def test_before_the_first_update_nothing_is_predicted(family: str, setting: str) -> None:
    weight = Parameter(torch.ones(2))
    optimizer = FAMILIES[family]([weight])
    assert_identity(ahead(optimizer, weight, (RATE, RATE), None, setting), weight)
    assert weight not in optimizer.state or family == "adagrad"  # Adagrad fills its state when it is made


@every_setting
def test_an_empty_momentum_buffer_is_no_state(setting: str) -> None:
    weight = Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=RATE, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = None
    last = LastStep(RATE, torch.ones(2), torch.ones(2))
    assert_identity(ahead(optimizer, weight, (RATE,), last, setting), weight)


@every_setting
def test_a_skipped_first_update_of_adam_leaves_no_state(setting: str) -> None:
    optimizer, weight, last = trained(adam(), updates=1)
    optimizer.state[weight]["step"].zero_()
    assert_identity(ahead(optimizer, weight, (RATE,), last, setting), weight)


@every_setting
def test_a_displacement_at_rate_zero_tells_no_direction(setting: str) -> None:
    optimizer, weight, last = trained(FAMILIES["rmsprop"])
    assert_identity(ahead(optimizer, weight, (RATE,), dataclasses.replace(last, rate=0.0), setting), weight)


@every_family
@every_setting
def test_a_prediction_is_a_new_tensor_and_changes_nothing(family: str, setting: str) -> None:
    optimizer, weight, last = trained(FAMILIES[family])
    before = copy.deepcopy((weight.detach(), optimizer.state_dict(), last.displacement, last.gradient))
    predicted = ahead(optimizer, weight, SCHEDULE, last, setting)
    assert not predicted.requires_grad
    assert (predicted.shape, predicted.dtype) == (weight.shape, weight.dtype)
    if family != "plain" or setting not in ("improved", "partial"):
        assert predicted.data_ptr() != weight.data_ptr()
        assert not torch.equal(predicted, weight)
        predicted.fill_(math.nan)
    after = (weight.detach(), optimizer.state_dict(), last.displacement, last.gradient)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@every_family
@every_setting
def test_only_what_is_asked_for_is_read(family: str, setting: str) -> None:
    optimizer, weight, last = trained(FAMILIES[family])
    group = optimizer.param_groups[0]
    needed = LastStep(
        last.rate,
        last.displacement if needs_displacement(optimizer, group, setting) else None,
        last.gradient if needs_gradient(optimizer, group, setting) else None,
    )
    whole = ahead(optimizer, weight, SCHEDULE, last, setting)
    assert torch.equal(whole, ahead(optimizer, weight, SCHEDULE, needed, setting))
    if needed.displacement is not None or needed.gradient is not None:
        with pytest.raises(InternalError, match="a last step without its"):
            ahead(optimizer, weight, SCHEDULE, LastStep(last.rate, None, None), setting)


def test_optimizers_with_a_direction_in_their_state_need_nothing_kept() -> None:
    for family in ("momentum", "nesterov-decay", "adam", "adamw"):
        optimizer = FAMILIES[family]([Parameter(torch.ones(2))])
        for setting in ("improved", "paper"):
            assert not needs_displacement(optimizer, optimizer.param_groups[0], setting)
            assert not needs_gradient(optimizer, optimizer.param_groups[0], setting)


@pytest.mark.parametrize("ask", [needs_displacement, needs_gradient])
def test_an_unknown_setting_is_refused_with_the_known_ones(
    ask: Callable[[Optimizer, dict[str, Any], str], bool],
) -> None:
    optimizer, weight, last = trained(sgd(), updates=1)
    with pytest.raises(UsageError, match="improved, paper, released-code"):
        ask(optimizer, optimizer.param_groups[0], "linear")
    with pytest.raises(UsageError, match="improved, paper, released-code"):
        ahead(optimizer, weight, (), last, "linear")


@every_setting
@pytest.mark.parametrize("family", ["momentum", "adamw"])
def test_a_complex_parameter_is_predicted_as_pairs_of_reals(family: str, setting: str) -> None:
    optimizer, weight, last = trained(FAMILIES[family], dtype=torch.complex128)
    source = torch.Generator().manual_seed(7)
    twin = Parameter(torch.view_as_real(torch.randn(3, 5, generator=source, dtype=torch.complex128)).clone())
    other = FAMILIES[family]([twin])
    for _ in range(4):
        twin.grad = torch.view_as_real(torch.randn(3, 5, generator=source, dtype=torch.complex128)).clone()
        other.step()
    predicted = ahead(optimizer, weight, SCHEDULE, last, setting)
    assert predicted.is_complex()
    twins = LastStep(RATE, None, twin.grad)
    torch.testing.assert_close(torch.view_as_real(predicted), ahead(other, twin, SCHEDULE, twins, setting))


@pytest.mark.parametrize("setting", ["improved", "paper"])
def test_a_sparse_displacement_moves_a_dense_weight(setting: str) -> None:
    weight = Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.SparseAdam([weight], lr=RATE)
    moved = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([[1.0, 2.0]]), (4, 2), check_invariants=True)
    predicted = ahead(optimizer, weight, (RATE,), LastStep(RATE, moved, None), setting)
    assert torch.equal(predicted, -moved.to_dense())


# --- laws ---

rates = st.floats(1e-6, 0.2)
some_rates = st.lists(rates, min_size=1, max_size=6).map(tuple)
families = st.sampled_from(sorted(FAMILIES))
any_setting = st.sampled_from(PREDICTORS)


@settings(max_examples=60, deadline=None)
@given(family=families, setting=any_setting, s=st.integers(1, 6))
def test_updates_at_rate_zero_move_nothing(family: str, setting: str, s: int) -> None:
    optimizer, weight, last = trained(FAMILIES[family], updates=2)
    assert torch.equal(ahead(optimizer, weight, (0.0,) * s, last, setting), weight.detach())


@settings(max_examples=60, deadline=None)
@given(family=families, setting=st.sampled_from(["paper", "released-code"]), rate=rates, s=st.integers(1, 6))
def test_the_linear_settings_are_linear_in_the_count_and_the_current_rate(
    family: str, setting: str, rate: float, s: int
) -> None:
    optimizer, weight, last = trained(FAMILIES[family], updates=2)
    here = weight.detach()
    once = ahead(optimizer, weight, (rate,), last, setting) - here
    assert_near = torch.testing.assert_close
    assert_near(ahead(optimizer, weight, (rate,) * s, last, setting) - here, s * once, rtol=1e-7, atol=1e-13)
    assert_near(ahead(optimizer, weight, (s * rate,), last, setting) - here, s * once, rtol=1e-7, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(family=families, first=rates, rest=some_rates)
def test_the_paper_reads_the_current_rate_only(family: str, first: float, rest: tuple[float, ...]) -> None:
    optimizer, weight, last = trained(FAMILIES[family], updates=2)
    constant = (first,) * (1 + len(rest))
    assert torch.equal(
        ahead(optimizer, weight, (first, *rest), last, "paper"), ahead(optimizer, weight, constant, last, "paper")
    )


@settings(max_examples=60, deadline=None)
@given(
    schedule=some_rates,
    mu=st.floats(0.01, 0.99),
    lam=st.sampled_from([0.0, 0.1, 1.0]),
    nesterov=st.booleans(),
    tau=st.floats(0.0, 0.9),
)
def test_improved_momentum_follows_torch_on_any_schedule(
    schedule: tuple[float, ...], mu: float, lam: float, nesterov: bool, tau: float
) -> None:
    options = {"momentum": mu, "weight_decay": lam, "nesterov": nesterov, "dampening": 0.0 if nesterov else tau}
    optimizer, weight, last = trained(sgd(**options), updates=2)
    torch.testing.assert_close(
        ahead(optimizer, weight, schedule, last), coasted(optimizer, schedule), rtol=1e-10, atol=1e-10
    )


@settings(max_examples=60, deadline=None)
@given(
    schedule=some_rates, beta1=st.floats(0.0, 0.99), beta2=st.floats(0.5, 0.999), lam=st.sampled_from([0.0, 0.1, 1.0])
)
def test_improved_adamw_follows_torch_on_any_schedule(
    schedule: tuple[float, ...], beta1: float, beta2: float, lam: float
) -> None:
    optimizer, weight, last = trained(adamw(betas=(beta1, beta2), weight_decay=lam), updates=2)
    torch.testing.assert_close(
        ahead(optimizer, weight, schedule, last), coasted(optimizer, schedule, hold=True), rtol=1e-8, atol=1e-8
    )
