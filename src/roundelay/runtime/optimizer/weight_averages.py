"""Averages of one stage's weights: the plan's moving average, or the weights with which the optimizer evaluates."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, final

import torch

from roundelay.ir.averages import EMA, EVALUATED
from roundelay.runtime.optimizer.stage_optimizer import has_eval_mode

States = dict[str, dict[str, Any]]


@final
class WeightAverages:
    """The exponential moving average of every trained parameter: E[0] = W[0], E[t+1] = d·E[t] + (1-d)·W[t+1].

    Computed by ``torch.lerp``, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` does.

    Args:
        decay: d; 0 for no average.
        parameters: the stage's, by name.
        start: optimizer state by parameter name of the checkpoint, if the run resumes, with averages among its entries;
            a parameter without one begins with its weights.
    """

    def __init__(
        self,
        decay: float,
        parameters: Mapping[str, torch.nn.Parameter],
        start: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._weight, self._parameters = 1.0 - decay, parameters
        trained = {n: p for n, p in parameters.items() if p.requires_grad} if decay else {}
        #: the moving averages themselves, by name
        self.moving = {n: start.get(n, {}).get(EMA, p.detach()).to(p.device, copy=True) for n, p in trained.items()}

    def update(self) -> None:
        """Update the averages after a step of the optimizer."""
        for name, average in self.moving.items():
            average.lerp_(self._parameters[name].detach(), self._weight)

    def entries(self, optimizer: torch.optim.Optimizer) -> States:
        """Copies on the CPU of what is evaluated instead of the weights, as state entries by parameter name."""
        averaged = {n: {EMA: average.to("cpu", copy=True)} for n, average in self.moving.items()}
        for name, weight in _evaluated(optimizer, self._parameters).items():
            averaged.setdefault(name, {})[EVALUATED] = weight.to("cpu")
        return averaged


def _evaluated(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The weights under the optimizer's ``eval()``, called on copies: the stage's own weights are in use."""
    if not has_eval_mode(optimizer):
        return {}
    twin, weights = copy.deepcopy((optimizer, dict(parameters)))
    with torch.no_grad():
        twin.eval()  # type: ignore[attr-defined]
    return {name: weight.detach() for name, weight in weights.items() if weight.requires_grad}
