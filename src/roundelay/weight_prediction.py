"""Weight prediction: what a stage's weights will be after its next updates.

Under an asynchronous rule a forward pass reads weights that some updates will have changed before the matching backward
pass. PipeOptim (Sect. III-A, Table I) closes that gap by predicting: ``P(W, s) = W - s * lr * dW``, where ``s`` is the
number of updates crossed and ``dW`` the direction that the optimizer's state shows after its last update. The functions
here are pure: tensors in, new tensors out; neither the weights nor the optimizer are touched. Four settings:

``improved`` (default)
    what the next ``s`` updates do if every gradient from now on is zero, each at its own learning rate.
``paper``
    Table I to the letter, linear in ``s * lr`` with the current learning rate. Completed where the table is silent:
    Nesterov (``mu^2 v``, what the next step applies with a zero gradient), and the decay of AdamW (``+ lambda W``).
``released-code``
    what the authors' program did: SGD moves along ``mu * buffer + (1 - dampening) * last gradient``, AdamW leaves its
    decay out. Every other optimizer as in ``paper``.
``partial``
    as ``improved``, but the first of the updates is taken with the mean of the gradients that its batch has summed by
    now. Nothing in the papers: with M > 1 most of a batch's backwards are done when the forwards of the next begin.

How ``s`` is counted differs between the settings too; that is the caller's part (the length of `Outlook.rates`).

An optimizer whose state holds no direction (plain SGD outside ``improved`` and ``released-code``, RMSprop, Adagrad,
and all that is neither SGD nor Adam) moves along its last measured displacement, ``W[u-1] - W[u]``, rescaled to the
rates to come.

**The arithmetic is fixed to the operation**, because a reference run must reproduce it bit for bit: coefficients are
Python floats accumulated from the first update to the last, and the tensor operations are those written here and no
others (``torch.add(W, v, alpha=-b)`` and ``W - b * v`` differ in the last bit). Multiplying by exactly 1.0 changes no
bit, so that pass over the weights is left out.
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
    """What a prediction may know about the future of one parameter group.

    Attributes:
        rates: learning rate of each update to predict, the next one first: ``lr(u), lr(u+1), ..., lr(u+s-1)`` where
            ``u`` updates are done. Its length is ``s``, the number of updates that the prediction crosses.
    """

    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LastStep:
    """What the last update did to one parameter; there is none before the parameter's first update.

    Attributes:
        rate: learning rate that the update used; 0 for the first updates of a run that goes on from a checkpoint, which
            does not hold displacements and gradients.
        displacement: ``W[u-1] - W[u]``, shaped like the weight; kept only where `needs_displacement` says so.
        gradient: what the update found in the parameter's ``grad``, not negated for ``maximize``; kept only where
            `needs_gradient` says so.
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

    Where the prediction is the identity by its rule the answer is ``weight.detach()``, not a copy: for ``s = 0``,
    before the parameter's first update (no state; in the rows that read no state, no last step), for plain SGD
    without decay under ``improved``, and along a displacement measured at rate zero. Otherwise it is a new tensor.

    Adam with coupled (L2) decay is predicted as if the decay's gradient were zero too: it enters the moments through
    the gradient, divided by the root of the second moment, so a zero-gradient step with it has no closed form, while
    what past decay left in the first moment is already counted. Under ``maximize`` nothing changes: torch's buffers
    hold the negated gradients already, and decay is never negated; only a raw last gradient is.

    Args:
        optimizer: SGD and Adam (with AdamW, and subclasses of either) are predicted from their state for ``weight``;
            all others from ``last.displacement``.
        group: the entry of ``optimizer.param_groups`` that holds ``weight``.
        weight: the live parameter, of any shape.
        setting: one of `PREDICTORS`.
        outlook: learning rates of the updates to cross; ``paper`` and ``released-code`` read the first only.
        last: the parameter's last update, or None before its first.
        begun: for ``partial``, the mean gradient that the next update's batch shows so far, shaped like ``weight``;
            None if it has none yet, which is foreseen as ``improved``. Not negated for ``maximize``.

    Returns:
        The predicted weight: shape, dtype and device of ``weight``; it requires no gradient.

    Raises:
        UsageError: the setting is not one of `PREDICTORS`.
        InternalError: ``last`` lacks the displacement or the gradient that `needs_displacement`, `needs_gradient`
            asked for.
    """
    _check(setting)
    now = weight.detach()
    if not outlook.rates:
        return now
    with torch.no_grad():
        if needs_displacement(optimizer, group, setting):
            return _displaced(now, setting, outlook, last)
        state = optimizer.state.get(weight, {})
        if setting == "partial":
            if begun is not None and isinstance(optimizer, SGD):
                return _rehearsed_sgd(now, group, state, outlook, begun)
            if begun is not None:
                return _rehearsed_adam(now, group, state, outlook, begun)
            setting = "improved"
        if isinstance(optimizer, Adam):
            return _adam(now, group, state, setting, outlook)
        if setting == "released-code":
            return _released_sgd(now, group, state, outlook, last)
        if group["momentum"] == 0:
            return _decayed(now, group, outlook, last)
        return _momentum(now, group, state, setting, outlook)


def needs_displacement(optimizer: Optimizer, group: dict[str, Any], setting: str) -> bool:
    """Whether `predict` moves the parameters of ``group`` along their last displacement, so that it must be kept.

    Raises:
        UsageError: the setting is not one of `PREDICTORS`.
    """
    _check(setting)
    if isinstance(optimizer, SGD):
        return setting == "paper" and bool(group["momentum"] == 0)
    return not isinstance(optimizer, Adam)


def needs_gradient(optimizer: Optimizer, group: dict[str, Any], setting: str) -> bool:
    """Whether `predict` reads the gradient of the last update of ``group``, so that it must be kept.

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


def _kept(tensor: Tensor | None, what: str) -> Tensor:
    """The tensor of a `LastStep` that a row of the table reads."""
    if tensor is None:
        raise InternalError(
            "weight prediction",
            got=f"a last step without its {what}",
            expected=f"the {what} of the last update, as needs_{what} asked",
            remedy="Please report this, with the optimizer and the setting.",
        )
    return tensor


# --- one function per row of the table: which coefficients, which direction ---


def _momentum(now: Tensor, group: dict[str, Any], state: dict[str, Any], setting: str, outlook: Outlook) -> Tensor:
    """SGD with momentum, Nesterov's or not."""
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
    """``(a, b)`` such that the zero-gradient updates lead from ``W`` to ``a W - b v``.

    With coupled decay the gradient is ``lambda W``, so the buffer, ``c v + d W``, mixes the two as well. Dampening
    scales what enters the buffer and hence the decay only: without decay it drops out, and ``b = sum_i rate_i mu^i``
    (Nesterov: ``mu^(i+1)``).
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
    """Plain SGD with a zero gradient: its decay is all that is left of an update."""
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
    """SGD as the authors' program predicted it: the last gradient counted once more on top of the buffer."""
    buffer = state.get("momentum_buffer")
    mu = float(group["momentum"])
    if last is None or (mu != 0 and buffer is None):
        return now
    if last.gradient is None and last.rate == 0.0 and buffer is not None:  # the run goes on from a checkpoint
        return torch.add(now, torch.mul(buffer, mu), alpha=-(len(outlook.rates) * outlook.rates[0]))
    if last.gradient is None and last.rate == 0.0:
        return now
    gradient = _kept(last.gradient, "gradient")
    sign = -1.0 if group["maximize"] else 1.0
    reach = len(outlook.rates) * outlook.rates[0]
    if buffer is None or mu == 0:
        return torch.add(now, gradient, alpha=-(sign * reach))
    direction = torch.mul(buffer, mu).add_(gradient, alpha=sign * (1 - float(group["dampening"])))
    return torch.add(now, direction, alpha=-reach)


def _adam(now: Tensor, group: dict[str, Any], state: dict[str, Any], setting: str, outlook: Outlook) -> Tensor:
    """Adam and AdamW, with the second moment (amsgrad: its maximum) held where the last update left it."""
    # A first update skipped for an infinite gradient leaves a state at step zero, where no bias correction exists.
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
    correction = math.sqrt(1 - beta2**updates)  # of the second moment: both sides of the ratio times it, a pass less
    root = second.sqrt().add_(float(group["eps"]) * correction)
    moved = _along_ratio(_reals(now), _reals(state["exp_avg"]), root, a, b * correction)
    return torch.view_as_complex(moved) if now.is_complex() else moved


def _adam_coefficients(beta1: float, lam: float, updates: float, rates: tuple[float, ...]) -> tuple[float, float]:
    """``(a, b)`` such that the zero-gradient updates lead from ``W`` to ``a W - b m / (sqrt(v-hat) + eps)``.

    ``b`` is the sum of ``q_i = rate_i beta1^i / (1 - beta1^(u+i))``, each shrunk by the decay of the updates after it.
    """
    a, b = 1.0, 0.0
    for i, rate in enumerate(rates, start=1):
        a = a * (1 - rate * lam)
        b = b * (1 - rate * lam) + rate * beta1**i / (1 - beta1 ** (updates + i))
    return a, b


def _rehearsed_sgd(
    now: Tensor, group: dict[str, Any], state: dict[str, Any], outlook: Outlook, begun: Tensor
) -> Tensor:
    """SGD's own next step with the gradient ``begun``, and behind it steps without a gradient."""
    mu, tau = float(group["momentum"]), float(group["dampening"])
    rate, *later = outlook.rates
    pull = _pull(now, group, begun)
    step, buffer = pull, state.get("momentum_buffer")
    if mu != 0:
        buffer = pull if buffer is None else torch.mul(buffer, mu).add_(pull, alpha=1 - tau)
        step = torch.add(pull, buffer, alpha=mu) if group["nesterov"] else buffer
    moved = torch.add(now, step, alpha=-rate)
    if not later:
        return moved
    if mu == 0 or buffer is None:
        return _decayed(moved, group, Outlook(tuple(later)), LastStep(rate, None, None))
    a, b = _momentum_coefficients(group, tuple(later))
    return _along(moved, buffer, a, b)


def _rehearsed_adam(
    now: Tensor, group: dict[str, Any], state: dict[str, Any], outlook: Outlook, begun: Tensor
) -> Tensor:
    """Adam's own next step with the gradient ``begun``; steps behind it hold the second moment which that step left."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decoupled = bool(group["decoupled_weight_decay"])
    lam = float(group["weight_decay"]) if decoupled else 0.0
    pull = _reals(begun.neg() if group["maximize"] else begun) if decoupled else _reals(_pull(now, group, begun))
    updates = float(state.get("step", 0)) + 1
    first, second = torch.mul(pull, 1 - beta1), torch.mul(pull, pull).mul_(1 - beta2)
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


def _pull(now: Tensor, group: dict[str, Any], gradient: Tensor) -> Tensor:
    """What enters the optimizer's buffers: the gradient, negated to maximize, with coupled decay."""
    pull, lam = gradient.neg() if group["maximize"] else gradient, float(group["weight_decay"])
    return torch.add(pull, now, alpha=lam) if lam else pull


def _displaced(now: Tensor, setting: str, outlook: Outlook, last: LastStep | None) -> Tensor:
    """Any other optimizer: its last displacement per unit of rate is its direction; none can be told at rate zero."""
    if last is None or last.rate == 0:
        return now
    displacement = _kept(last.displacement, "displacement")
    reach = len(outlook.rates) * outlook.rates[0]
    if setting in ("improved", "partial"):
        reach = 0.0
        for rate in outlook.rates:  # not sum(): from Python 3.12 on it compensates, which changes the last bit
            reach += rate
    return torch.add(now, displacement, alpha=-(reach / last.rate))


# --- the tensor operations ---


def _along(now: Tensor, direction: Tensor, a: float, b: float) -> Tensor:
    """``a now - b direction``."""
    if a == 1.0:
        return torch.add(now, direction, alpha=-b)
    return torch.mul(now, a).add_(direction, alpha=-b)


def _along_ratio(now: Tensor, over: Tensor, under: Tensor, a: float, b: float) -> Tensor:
    """``a now - b over / under``."""
    if a == 1.0:
        return torch.addcdiv(now, over, under, value=-b)
    return torch.mul(now, a).addcdiv_(over, under, value=-b)


def _reals(tensor: Tensor) -> Tensor:
    """Adam treats a complex parameter as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
