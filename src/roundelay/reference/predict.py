"""P(W, s): the weights of one parameter s updates ahead, from the optimizer's state at W's version.

Every arithmetic operation is part of the rule: ``torch.add(W, v, alpha=-b)`` and ``W - b * v`` differ in the last bit.
Coefficients are Python floats, accumulated in the order i = 1..s.

``improved`` is what the next s updates do if every gradient from now on is zero; ``paper`` is the linear form of
PipeOptim (2023), Table I; ``released-code`` is what the authors' program does. Before its first update a parameter is
predicted not to change. ``partial`` takes the first of the s updates with the gradient of its batch so far, and the
others as ``improved``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from roundelay.errors import PlanError

Rate = Callable[[int], float]
"""i to r_i, the learning rate of the i-th update after this version; i counts from 1."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a prediction reads of one parameter at one version.

    Args:
        optimizer: type of the optimizer.
        group: hyperparameters of the parameter's group for the next update.
        state: the parameter's optimizer state.
        updated: whether any update has changed the parameter.
        gradient: gradient of the last update; None if there was none, or if the run resumed here.
        displacement: weights before the last update minus those after it; None if the run began or resumed here.
        last_rate: learning rate of the last update.
        begun: for ``partial``: mean of the gradients that the next update's batch has summed so far; None if there is
            none.
    """

    optimizer: type[Optimizer]
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    updated: bool
    gradient: torch.Tensor | None
    displacement: torch.Tensor | None
    last_rate: float
    begun: torch.Tensor | None = None

    def number(self, name: str) -> float:
        """Return a hyperparameter of the group as a float."""
        return float(self.group[name])


@dataclass(frozen=True, slots=True)
class Ahead:
    """The distance s of a prediction, and the learning rates of the updates in between."""

    distance: int
    rate: Rate

    @property
    def linear(self) -> float:
        """The factor s * lr of the linear forms, with lr = r_1."""
        return self.distance * self.rate(1)

    def rates(self) -> list[float]:
        """Return r_1 .. r_s."""
        return [self.rate(i) for i in range(1, self.distance + 1)]


def distance(predictor: str, stage: int, num_stages: int, crossed: int) -> int:
    """Return s, the number of updates that a prediction looks ahead.

    Args:
        predictor: name of the setting.
        stage: k.
        num_stages: D.
        crossed: t - U, the updates between the version read and the batch's own.

    Raises:
        PlanError: no setting has this name.
    """
    known = {"improved": crossed, "paper": num_stages - 1 - stage, "released-code": num_stages - stage}
    known["partial"] = crossed
    if predictor not in known:
        raise PlanError(
            "the predictor setting",
            got=repr(predictor),
            expected="one of " + ", ".join(known),
            remedy="Choose one of these for a rule that predicts.",
        )
    return known[predictor]


def predict(predictor: str, weight: torch.Tensor, past: Past, ahead: Ahead) -> torch.Tensor:
    """Return P(W, s) of one parameter; ``weight`` itself if it is predicted not to change.

    Args:
        predictor: name of the setting.
        weight: W.
        past: the parameter's optimizer state and last update at the version of W.
        ahead: s and the learning rates.
    """
    if ahead.distance == 0:
        return weight
    if predictor == "partial":
        if past.begun is not None and issubclass(past.optimizer, SGD):
            return _sgd_partial(weight, past, past.begun, ahead)
        if past.begun is not None and issubclass(past.optimizer, Adam):
            return _adam_partial(weight, past, past.begun, ahead)
        predictor = "improved"
    if not past.updated:
        return weight
    if issubclass(past.optimizer, SGD):
        formula = {"improved": _sgd_improved, "paper": _sgd_paper, "released-code": _sgd_released_code}[predictor]
        return formula(weight, past, ahead)
    if issubclass(past.optimizer, Adam):
        return _adam_family(predictor, weight, past, ahead)
    return _last_displacement(weight, past, _total(ahead.rates()) if predictor == "improved" else ahead.linear)


def _total(rates: list[float]) -> float:
    """Return the sum, added one after the other: ``sum`` compensates rounding from Python 3.12 on."""
    total = 0.0
    for rate in rates:
        total = total + rate
    return total


def _last_displacement(weight: torch.Tensor, past: Past, reach: float) -> torch.Tensor:
    """Repeat the last update: W - reach * (W[u-1] - W[u]) / lr(u-1)."""
    if past.displacement is None or past.last_rate == 0.0:
        return weight
    return torch.add(weight, past.displacement, alpha=-(reach / past.last_rate))


def _sgd_improved(weight: torch.Tensor, past: Past, ahead: Ahead) -> torch.Tensor:
    """``improved``: s updates with zero gradients lead from W to a W - b v, with v the momentum buffer."""
    decay, rates = past.number("weight_decay"), ahead.rates()
    if past.number("momentum") == 0.0:
        a = 1.0
        for rate in rates:
            a = a * (1.0 - rate * decay)
        return weight if a == 1.0 else torch.mul(weight, a)
    v = past.state.get("momentum_buffer")
    if v is None:
        return weight
    if decay == 0.0:
        return torch.add(weight, v, alpha=-_without_decay(past, rates))
    a, b = _with_decay(past, rates)
    return torch.add(weight, v, alpha=-b) if a == 1.0 else torch.mul(weight, a).add_(v, alpha=-b)


def _without_decay(past: Past, rates: list[float]) -> float:
    """Return b, the sum of r_i mu^i, with Nesterov r_i mu^(i+1)."""
    mu, nesterov = past.number("momentum"), bool(past.group["nesterov"])
    b, c = 0.0, 1.0
    for rate in rates:
        c = mu * c
        b = b + rate * (mu * c if nesterov else c)
    return b


def _with_decay(past: Past, rates: list[float]) -> tuple[float, float]:
    """Return a and b: weights become a W - b v and the buffer c v + d W, as decay is part of the gradient."""
    mu, tau, lam = past.number("momentum"), past.number("dampening"), past.number("weight_decay")
    a, b, c, d = 1.0, 0.0, 1.0, 0.0
    for rate in rates:
        c, d = mu * c - (1.0 - tau) * lam * b, mu * d + (1.0 - tau) * lam * a
        if past.group["nesterov"]:
            a, b = a - rate * (lam * a + mu * d), b - rate * (lam * b - mu * c)
        else:
            a, b = a - rate * d, b + rate * c
    return a, b


def _sgd_paper(weight: torch.Tensor, past: Past, ahead: Ahead) -> torch.Tensor:
    """Table I: W - s lr v; with Nesterov mu^2 v in place of v; without momentum the last displacement."""
    mu = past.number("momentum")
    if mu == 0.0:
        return _last_displacement(weight, past, ahead.linear)
    v = past.state.get("momentum_buffer")
    if v is None:
        return weight
    return torch.add(weight, v, alpha=-(ahead.linear * mu * mu if past.group["nesterov"] else ahead.linear))


def _sgd_released_code(weight: torch.Tensor, past: Past, ahead: Ahead) -> torch.Tensor:
    """The authors' program: the direction is mu buf + (1 - tau) g, with the gradient g of the last update."""
    gradient = past.gradient
    if gradient is not None and past.group["maximize"]:
        gradient = -gradient
    direction, buffer = gradient, past.state.get("momentum_buffer")
    if buffer is not None:
        direction = torch.mul(buffer, past.number("momentum"))
        if gradient is not None:
            direction.add_(gradient, alpha=1.0 - past.number("dampening"))
    return weight if direction is None else torch.add(weight, direction, alpha=-ahead.linear)


def _adam_family(predictor: str, weight: torch.Tensor, past: Past, ahead: Ahead) -> torch.Tensor:
    """Adam and AdamW: along m / (sqrt(v^) + eps), with a constant second moment."""
    u = float(past.state["step"]) if "step" in past.state else 0.0
    if u == 0.0:
        return weight
    beta1, beta2 = (float(beta) for beta in past.group["betas"])
    decoupled = bool(past.group.get("decoupled_weight_decay", False)) or issubclass(past.optimizer, AdamW)
    lam = past.number("weight_decay") if decoupled else 0.0
    if predictor == "improved":
        a, b = _adam_steps(ahead.rates(), beta1, u, lam)
    else:
        a = 1.0 - ahead.linear * lam if predictor == "paper" else 1.0
        b = ahead.linear / (1.0 - beta1**u)
    second = _pairs(past.state["max_exp_avg_sq" if past.group["amsgrad"] else "exp_avg_sq"])
    c = math.sqrt(1.0 - beta2**u)
    denominator = torch.add(torch.sqrt(second), past.number("eps") * c)  # times c, and so is b
    base = _pairs(weight) if a == 1.0 else torch.mul(_pairs(weight), a)
    predicted = torch.addcdiv(base, _pairs(past.state["exp_avg"]), denominator, value=-(b * c))
    return torch.view_as_complex(predicted) if weight.is_complex() else predicted


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs of reals, as Adam treats them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _adam_steps(rates: list[float], beta1: float, u: float, lam: float) -> tuple[float, float]:
    """Return a and b: weights become a W - b m / (sqrt(v^) + eps), with q_i = r_i beta1^i / (1 - beta1^(u+i))."""
    a, b = 1.0, 0.0
    for i, rate in enumerate(rates, start=1):
        keep = 1.0 - rate * lam
        a = a * keep
        b = b * keep + rate * beta1**i / (1.0 - beta1 ** (u + i))
    return a, b


def _sgd_partial(weight: torch.Tensor, past: Past, gradient: torch.Tensor, ahead: Ahead) -> torch.Tensor:
    """``partial``: one step of SGD with ``gradient``, then steps with zero gradients from the result."""
    mu, lam = past.number("momentum"), past.number("weight_decay")
    if past.group["maximize"]:
        gradient = torch.neg(gradient)
    if lam != 0.0:
        gradient = torch.add(gradient, weight, alpha=lam)
    direction, v = gradient, past.state.get("momentum_buffer")
    if mu != 0.0:
        entering = 1.0 - past.number("dampening")
        v = gradient if v is None else torch.add(torch.mul(v, mu), gradient, alpha=entering)
        direction = torch.add(gradient, v, alpha=mu) if past.group["nesterov"] else v
    stepped = torch.add(weight, direction, alpha=-ahead.rate(1))
    rest = Ahead(ahead.distance - 1, lambda i: ahead.rate(i + 1))
    if rest.distance == 0:
        return stepped
    after = replace(past, updated=True, state={} if mu == 0.0 else {"momentum_buffer": v}, begun=None)
    return _sgd_improved(stepped, after, rest)


def _adam_partial(weight: torch.Tensor, past: Past, gradient: torch.Tensor, ahead: Ahead) -> torch.Tensor:
    """``partial``: a step of Adam with ``gradient``, then steps with zero gradients and that step's second moment n."""
    decoupled = bool(past.group.get("decoupled_weight_decay", False)) or issubclass(past.optimizer, AdamW)
    lam, u = past.number("weight_decay"), 1.0
    if past.group["maximize"]:
        gradient = torch.neg(gradient)
    if lam != 0.0 and not decoupled:
        gradient = torch.add(gradient, weight, alpha=lam)
    beta1, beta2 = (float(beta) for beta in past.group["betas"])
    gradient = _pairs(gradient)
    m, n = gradient * (1.0 - beta1), gradient * gradient * (1.0 - beta2)
    if past.state:
        u = float(past.state["step"]) + 1.0
        m = torch.add(m, _pairs(past.state["exp_avg"]), alpha=beta1)
        n = torch.add(n, _pairs(past.state["exp_avg_sq"]), alpha=beta2)
        if past.group["amsgrad"]:
            n = torch.maximum(n, _pairs(past.state["max_exp_avg_sq"]))
    a, b = 1.0, 0.0
    for power, rate in enumerate(ahead.rates()):
        keep = 1.0 - rate * lam if decoupled else 1.0
        a, b = a * keep, b * keep + rate * beta1**power / (1.0 - beta1 ** (u + power))
    c = math.sqrt(1.0 - beta2**u)
    base = _pairs(weight) if a == 1.0 else torch.mul(_pairs(weight), a)
    predicted = torch.addcdiv(base, m, torch.add(torch.sqrt(n), past.number("eps") * c), value=-(b * c))
    return torch.view_as_complex(predicted) if weight.is_complex() else predicted
