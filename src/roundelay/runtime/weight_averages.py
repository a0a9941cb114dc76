"""Averages of one stage's weights: a moving one that the plan asks for, or what the optimizer evaluates with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, final

import torch

from roundelay.ir.plan import EMA, EVALUATED
from roundelay.runtime.stage_optimizer import switches

States = dict[str, dict[str, Any]]


@final
class WeightAverages:
    """The exponential moving average of every trained parameter: E[0] = W[0], E[t+1] = d·E[t] + (1-d)·W[t+1].

    Computed by ``torch.lerp``, as ``torch.optim.swa_utils.get_ema_multi_avg_fn`` does.

    Args:
        decay: d; 0 for no average.
        parameters: the stage's, by name.
        start: optimizer state by parameter name where the run goes on, with averages among its entries; a parameter
            without one begins with its weights.
    """

    def __init__(
        self,
        decay: float,
        parameters: Mapping[str, torch.nn.Parameter],
        start: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._weight, self._parameters = 1.0 - decay, parameters
        trained = {n: p for n, p in parameters.items() if p.requires_grad} if decay else {}
        self._averages = {n: start.get(n, {}).get(EMA, p.detach()).to(p.device, copy=True) for n, p in trained.items()}

    def update(self) -> None:
        """The optimizer has made a step."""
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name].detach(), self._weight)

    def entries(self, optimizer: torch.optim.Optimizer) -> States:
        """Copies of what is evaluated in the weights' place, as entries of a state by parameter name, on the CPU."""
        averaged = {n: {EMA: average.to("cpu", copy=True)} for n, average in self._averages.items()}
        for name, weight in _evaluated(optimizer, self._parameters).items():
            averaged.setdefault(name, {})[EVALUATED] = weight.to("cpu")
        return averaged


def _evaluated(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The weights under the optimizer's ``eval()``, made on copies: those in flight stay as they are."""
    if not switches(optimizer):
        return {}
    twin, weights = copy.deepcopy((optimizer, dict(parameters)))
    with torch.no_grad():
        twin.eval()  # type: ignore[attr-defined]
    return {name: weight.detach() for name, weight in weights.items() if weight.requires_grad}
