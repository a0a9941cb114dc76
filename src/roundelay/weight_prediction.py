"""Weight prediction: estimates a stage's weights after its next updates.

Under an asynchronous rule, some updates change the weights between a forward and its backward. PipeOptim (Sect. III-A,
Table I) lets the forward read predicted weights instead: ``P(W, s) = W - s * lr * dW``, where ``s`` is the number of
updates in between and ``dW`` the direction of the optimizer's state after its last update. The functions here are pure:
they return new tensors and change neither the weights nor the optimizer. Four settings:

``improved`` (default)
    the next ``s`` updates if every gradient from now on is zero, each at its own learning rate.
``paper``
    Table I literally, linear in ``s * lr`` with the current learning rate. Where the table says nothing: for Nesterov
    momentum ``mu^2 v``, which the next step applies with a zero gradient, and for AdamW its decay (``+ lambda W``).
``released-code``
    what the authors' program does: SGD moves along ``mu * buffer + (1 - dampening) * last gradient``, and AdamW is
    predicted without its decay. Every other optimizer as in ``paper``.
``partial``
    as ``improved``, but the first of the updates uses the mean of the gradients that its batch has summed so far. Not
    from a paper: with M > 1, most backwards of a batch are done when the forwards of the next begin.

The settings also count ``s`` differently; the caller does that (the length of `Outlook.rates`).

An optimizer whose state has no direction (plain SGD except with ``improved`` and ``released-code``, RMSprop, Adagrad,
and everything that is neither SGD nor Adam) is predicted to repeat its last displacement, ``W[u-1] - W[u]``, rescaled
to the coming learning rates.

**Every arithmetic operation is specified**, because the reference run must reproduce it bit for bit: coefficients are
Python floats accumulated from the first update to the last, and the tensor operations are exactly those written here
(``torch.add(W, v, alpha=-b)`` and ``W - b * v`` differ in the last bit). Multiplying by exactly 1.0 changes no bit, so
that pass over the weights is omitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from roundelay.errors import InternalError, UsageError

PREDICTORS = ("improved", "paper", "released-code", "partial")
"""The settings of `predict`; the first is the default."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The coming learning rates of one parameter group.

    Attributes:
        rates: learning rate of each update to predict, the next one first: ``lr(u), lr(u+1), ..., lr(u+s-1)`` after
            ``u`` updates. Its length is ``s``, the number of updates to predict ahead.
    """

    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LastStep:
    """The last update of one parameter.

    Attributes:
        rate: learning rate of the update; 0 if the run was resumed after it from a checkpoint without displacements
            and gradients.
        displacement: ``W[u-1] - W[u]``, shaped like the weight; None unless `needs_displacement`.
        gradient: the parameter's ``grad`` in the update, not negated for ``maximize``; None unless `needs_gradient`.
    """

    rate: float
    displacement: Tensor | None
    gradient: Tensor | None


def predict(
    optimizer: Optimizer,
    group: dict[str, Any],
    weight: Tensor,
    *,
    setting: str,
    outlook: Outlook,
    last: LastStep | None,
    begun: Tensor | None = None,
) -> Tensor:
    """Predict one parameter ``s = len(outlook.rates)`` updates ahead (PipeOptim, Sect. III-A, Eqs. 3 and 5, Table I).

    Where the prediction is the identity, ``weight.detach()`` is returned, not a copy: for ``s = 0``, before the
    parameter's first update (no state, or no last step where no state is read), for plain SGD without decay with
    ``improved``, and for a displacement measured at learning rate zero. Otherwise the result is a new tensor.

    Adam with coupled (L2) decay is predicted as if the decay's gradient were zero too: decay enters the moments through
    the gradient, divided by the root of the second moment, so a zero-gradient step with it has no closed form; the part
    of past decay in the first moment is included. ``maximize`` needs no special case except for a raw last gradient:
    torch's buffers hold negated gradients, and decay is never negated.

    Args:
        optimizer: SGD and Adam (with AdamW, and subclasses of either) are predicted from their state for ``weight``;
            all others from ``last.displacement``.
        group: the entry of ``optimizer.param_groups`` that holds ``weight``.
        weight: the live parameter, of any shape.
        setting: one of `PREDICTORS`.
        outlook: learning rates of the updates to predict; ``paper`` and ``released-code`` read the first only.
        last: the parameter's last update, or None before its first.
        begun: for ``partial``, the mean gradient of the next update's batch so far, shaped like ``weight``, not negated
            for ``maximize``; with None the prediction is that of ``improved``.

    Returns:
        The predicted weight: shape, dtype and device of ``weight``; it requires no gradient.

    Raises:
        UsageError: the setting is not one of `PREDICTORS`.
        InternalError: ``last`` lacks a displacement or gradient that `needs_displacement` or `needs_gradient` requires.
    """
    _check(setting)
    now = weight.detach()
    if not outlook.rates:
        return now
    with torch.no_grad():
        if needs_displacement(optimizer, group, setting):
            return _last_displacement(now, setting, outlook, last)
        state = optimizer.state.get(weight, {})
        if setting == "partial":
            if begun is not None and isinstance(optimizer, SGD):
                return _partial_sgd(now, group, state, outlook, begun)
            if begun is not None:
                return _partial_adam(now, group, state, outlook, begun)
            setting = "improved"
        if isinstance(optimizer, Adam):
            return _adam(now, group, state, setting, outlook)
        if setting == "released-code":
            return _released_sgd(now, group, state, outlook, last)
        if group["momentum"] == 0:
            return _decayed(now, group, outlook, last)
        return _momentum(now, group, state, setting, outlook)


def needs_displacement(optimizer: Optimizer, group: dict[str, Any], setting: str) -> bool:
    """Return whether `predict` reads the last displacement of the parameters of ``group``, so that it must be kept.

    Raises:
        UsageError: the setting is not one of `PREDICTORS`.
    """
    _check(setting)
    if isinstance(optimizer, SGD):
        return setting == "paper" and bool(group["momentum"] == 0)
    return not isinstance(optimizer, Adam)


def needs_gradient(optimizer: Optimizer, group: dict[str, Any], setting: str) -> bool:
    """Return whether `predict` reads the gradient of the last update of ``group``, so that it must be kept.

    Raises:
        UsageError: the setting is not one of `PREDICTORS`.
    """
    _check(setting)
    return setting == "released-code" and isinstance(optimizer, SGD)


def _check(setting: str) -> None:
    if setting not in PREDICTORS:
        raise UsageError(
            "weight prediction",
            got=f"setting {setting!r}",
            expected=f"one of {', '.join(PREDICTORS)}",
            remedy="Choose one of these; improved is the default.",
        )


def _required(tensor: Tensor | None, name: str) -> Tensor:
    """Return a tensor of a `LastStep`, which must be there."""
    if tensor is None:
        raise InternalError(
            "weight prediction",
            got=f"a last step without its {name}",
            expected=f"the {name} of the last update, which needs_{name} requires",
            remedy="Please report this, with the optimizer and the setting.",
        )
    return tensor


# --- one function per optimizer and setting: which coefficients, which direction ---


def _momentum(now: Tensor, group: dict[str, Any], state: dict[str, Any], setting: str, outlook: Outlook) -> Tensor:
    """SGD with momentum, Nesterov or not, by ``improved`` or ``paper``."""
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return now
    if setting == "improved":
        a, b = _momentum_coefficients(group, outlook.rates)
        return _along(now, buffer, a, b)
    mu = float(group["momentum"])
    reach = len(outlook.rates) * outlook.rates[0]
    return _along(now, buffer, 1.0, reach * mu * mu if group["nesterov"] else reach)


def _momentum_coefficients(group: dict[str, Any], rates: tuple[float, ...]) -> tuple[float, float]:
    """Return ``(a, b)`` such that the zero-gradient updates lead from ``W`` to ``a W - b v``.

    With coupled decay the gradient is ``lambda W``, so that the buffer becomes ``c v + d W``. Dampening scales what
    enters the buffer, here only the decay: without decay ``b = sum_i rate_i mu^i`` (Nesterov: ``mu^(i+1)``).
    """
    mu, tau = float(group["momentum"]), float(group["dampening"])
    lam = float(group["weight_decay"])
    a, b, c, d = 1.0, 0.0, 1.0, 0.0
    for rate in rates:
        c, d = mu * c - (1 - tau) * lam * b, mu * d + (1 - tau) * lam * a
        if group["nesterov"]:
            a, b = a - rate * (lam * a + mu * d), b - rate * (lam * b - mu * c)
        else:
            a, b = a - rate * d, b + rate * c
    return a, b


def _decayed(now: Tensor, group: dict[str, Any], outlook: Outlook, last: LastStep | None) -> Tensor:
    """Plain SGD with a zero gradient: an update applies only the decay."""
    lam = float(group["weight_decay"])
    if last is None or lam == 0:
        return now
    a = 1.0
    for rate in outlook.rates:
        a = a * (1 - rate * lam)
    return torch.mul(now, a)


def _released_sgd(
    now: Tensor, group: dict[str, Any], state: dict[str, Any], outlook: Outlook, last: LastStep | None
) -> Tensor:
    """SGD as in the authors' program, which adds the last gradient to the buffer once more."""
    buffer = state.get("momentum_buffer")
    mu = float(group["momentum"])
    if last is None or (mu != 0 and buffer is None):
        return now
    if last.gradient is None and last.rate == 0.0 and buffer is not None:  # resumed from a checkpoint
        return torch.add(now, torch.mul(buffer, mu), alpha=-(len(outlook.rates) * outlook.rates[0]))
    if last.gradient is None and last.rate == 0.0:
        return now
    gradient = _required(last.gradient, "gradient")
    sign = -1.0 if group["maximize"] else 1.0
    reach = len(outlook.rates) * outlook.rates[0]
    if buffer is None or mu == 0:
        return torch.add(now, gradient, alpha=-(sign * reach))
    direction = torch.mul(buffer, mu).add_(gradient, alpha=sign * (1 - float(group["dampening"])))
    return torch.add(now, direction, alpha=-reach)


def _adam(now: Tensor, group: dict[str, Any], state: dict[str, Any], setting: str, outlook: Outlook) -> Tensor:
    """Adam and AdamW, with the second moment (amsgrad: its maximum) fixed at its value after the last update."""
    # If the first update is skipped for an infinite gradient, the state is at step 0 and has no bias correction.
    updates = float(state.get("step", 0))
    if updates == 0:
        return now
    decoupled = bool(group["decoupled_weight_decay"]) and setting != "released-code"
    lam = float(group["weight_decay"]) if decoupled else 0.0
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if setting == "improved":
        a, b = _adam_coefficients(beta1, lam, updates, outlook.rates)
    else:
        reach = len(outlook.rates) * outlook.rates[0]
        a, b = 1.0 - reach * lam, reach / (1 - beta1**updates)
    second = _reals(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
    correction = math.sqrt(1 - beta2**updates)  # multiplied into numerator and eps: saves a pass over the moment
    root = second.sqrt().add_(float(group["eps"]) * correction)
    moved = _along_ratio(_reals(now), _reals(state["exp_avg"]), root, a, b * correction)
    return torch.view_as_complex(moved) if now.is_complex() else moved


def _adam_coefficients(beta1: float, lam: float, updates: float, rates: tuple[float, ...]) -> tuple[float, float]:
    """Return ``(a, b)`` such that the zero-gradient updates lead from ``W`` to ``a W - b m / (sqrt(v-hat) + eps)``.

    ``b`` is the sum of ``q_i = rate_i beta1^i / (1 - beta1^(u+i))``, each reduced by the decay of the updates after it.
    """
    a, b = 1.0, 0.0
    for i, rate in enumerate(rates, start=1):
        a = a * (1 - rate * lam)
        b = b * (1 - rate * lam) + rate * beta1**i / (1 - beta1 ** (updates + i))
    return a, b


def _partial_sgd(now: Tensor, group: dict[str, Any], state: dict[str, Any], outlook: Outlook, begun: Tensor) -> Tensor:
    """SGD's next step with the gradient ``begun``, then steps with a zero gradient."""
    mu, tau = float(group["momentum"]), float(group["dampening"])
    rate, *later = outlook.rates
    entering = _entering(now, group, begun)
    step, buffer = entering, state.get("momentum_buffer")
    if mu != 0:
        buffer = entering if buffer is None else torch.mul(buffer, mu).add_(entering, alpha=1 - tau)
        step = torch.add(entering, buffer, alpha=mu) if group["nesterov"] else buffer
    moved = torch.add(now, step, alpha=-rate)
    if not later:
        return moved
    if mu == 0 or buffer is None:
        return _decayed(moved, group, Outlook(tuple(later)), LastStep(rate, None, None))
    a, b = _momentum_coefficients(group, tuple(later))
    return _along(moved, buffer, a, b)


def _partial_adam(now: Tensor, group: dict[str, Any], state: dict[str, Any], outlook: Outlook, begun: Tensor) -> Tensor:
    """Adam's next step with the gradient ``begun``, then steps with a zero gradient and that step's second moment."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decoupled = bool(group["decoupled_weight_decay"])
    lam = float(group["weight_decay"]) if decoupled else 0.0
    entering = (
        _reals(begun.neg() if group["maximize"] else begun) if decoupled else _reals(_entering(now, group, begun))
    )
    updates = float(state.get("step", 0)) + 1
    first, second = torch.mul(entering, 1 - beta1), torch.mul(entering, entering).mul_(1 - beta2)
    if state:
        first.add_(_reals(state["exp_avg"]), alpha=beta1)
        second.add_(_reals(state["exp_avg_sq"]), alpha=beta2)
    if state and group["amsgrad"]:
        second = torch.maximum(_reals(state["max_exp_avg_sq"]), second)
    a, b = 1.0, 0.0
    for i, rate in enumerate(outlook.rates):
        a = a * (1 - rate * lam)
        b = b * (1 - rate * lam) + rate * beta1**i / (1 - beta1 ** (updates + i))
    correction = math.sqrt(1 - beta2**updates)
    root = second.sqrt_().add_(float(group["eps"]) * correction)
    moved = _along_ratio(_reals(now), first, root, a, b * correction)
    return torch.view_as_complex(moved) if now.is_complex() else moved


def _entering(now: Tensor, group: dict[str, Any], gradient: Tensor) -> Tensor:
    """Return what enters the optimizer's buffers: the gradient, negated for ``maximize``, plus coupled decay."""
    entering, lam = gradient.neg() if group["maximize"] else gradient, float(group["weight_decay"])
    return torch.add(entering, now, alpha=lam) if lam else entering


def _last_displacement(now: Tensor, setting: str, outlook: Outlook, last: LastStep | None) -> Tensor:
    """Any other optimizer: along its last displacement per unit of learning rate, undefined at rate zero."""
    if last is None or last.rate == 0:
        return now
    displacement = _required(last.displacement, "displacement")
    reach = len(outlook.rates) * outlook.rates[0]
    if setting in ("improved", "partial"):
        reach = 0.0
        for rate in outlook.rates:  # not sum(): from Python 3.12 on it compensates rounding, which changes the last bit
            reach += rate
    return torch.add(now, displacement, alpha=-(reach / last.rate))


# --- the tensor operations ---


def _along(now: Tensor, direction: Tensor, a: float, b: float) -> Tensor:
    """Return ``a now - b direction``."""
    if a == 1.0:
        return torch.add(now, direction, alpha=-b)
    return torch.mul(now, a).add_(direction, alpha=-b)


def _along_ratio(now: Tensor, over: Tensor, under: Tensor, a: float, b: float) -> Tensor:
    """Return ``a now - b over / under``."""
    if a == 1.0:
        return torch.addcdiv(now, over, under, value=-b)
    return torch.mul(now, a).addcdiv_(over, under, value=-b)


def _reals(tensor: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs of reals, as Adam treats them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
