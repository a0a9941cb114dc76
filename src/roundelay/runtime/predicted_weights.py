"""Predicted weights of one stage, and what it remembers of its last update in order to make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch

from roundelay.ir.rule import NO_PREDICTOR
from roundelay.runtime.gradients import Gradients
from roundelay.runtime.stage_optimizer import RateTable, groups_of
from roundelay.weight_prediction import LastStep, Outlook, needs_displacement, needs_gradient, predict

Tensors = dict[str, torch.Tensor]


@final
class PredictedWeights:
    """What the plan's predictor says, each thing said once.

    Args:
        setting: the predictor's name.
        optimizer: the stage's.
        parameters: the stage's, by name.
        rates: learning rates of coming updates.
        gradients: of the batch that is under way.
        last: every parameter's last update, where the run goes on.
    """

    def __init__(
        self,
        setting: str,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        rates: RateTable,
        gradients: Gradients,
        last: Mapping[str, LastStep],
    ) -> None:
        self._setting, self._optimizer, self._parameters = setting, optimizer, parameters
        self._rates, self._gradients = rates, gradients
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._made: dict[str, tuple[tuple[int, int, int], Tensors]] = {}  # by opcode: what was asked, and the answer
        self.last = dict(last)
        """Every parameter's last update, as far as a prediction reads it."""

    def weights(self, opcode: str, version: int, distance: int) -> Tensors:
        """The stage's weights ``distance`` updates ahead.

        They are kept until the update; by ``partial``, until there is more to predict them from.

        Args:
            opcode: whoever asks; forward and backward may ask in turns.
            version: updates made.
            distance: updates ahead, at least 1.
        """
        seen = self._gradients.rows if self._setting == "partial" else 0
        asked = version, distance, seen
        if opcode not in self._made or self._made[opcode][0] != asked:
            self._made.pop(opcode, None)  # before the new one is made: both would be a version more
            other = [made for key, made in self._made.values() if key == asked]  # the other pass's
            self._made[opcode] = asked, other[0] if other else self._predict(version, distance)
        return self._made[opcode][1]

    def clear(self) -> None:
        """An update has been made."""
        self._made = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the optimizer steps: what later predictions need to know of the step is kept."""
        if self._setting == NO_PREDICTOR:
            yield
            return
        groups = [(group, p) for _, group, p in groups_of(self._optimizer)]
        before, consumed = {}, {}  # copies: the step may write into either
        for group, p in groups:
            if needs_displacement(self._optimizer, group, self._setting):
                before[id(p)] = p.detach().clone()
            if p.grad is not None and needs_gradient(self._optimizer, group, self._setting):
                consumed[id(p)] = p.grad.clone()
        yield
        for group, p in groups:
            if p.grad is not None:
                self.last[self._names[id(p)]] = LastStep(
                    rate=float(group["lr"]),
                    displacement=before[id(p)] - p.detach() if id(p) in before else None,
                    gradient=consumed.get(id(p)),
                )

    def _predict(self, version: int, distance: int) -> Tensors:
        predicted: Tensors = dict(self._parameters)
        with torch.no_grad():
            begun = self._gradients.begun() if self._setting == "partial" else {}
            for index, group, p in groups_of(self._optimizer):
                name = self._names[id(p)]
                predicted[name] = predict(
                    self._optimizer,
                    group,
                    p,
                    setting=self._setting,
                    outlook=Outlook(
                        self._rates.rates(index, version, distance)
                        if self._rates.scheduled
                        else (float(group["lr"]),) * distance  # which the optimizer's own step may have written
                    ),
                    last=self.last.get(name),
                    begun=begun.get(name),
                )
        return predicted
