"""Predicted weights of one stage, and the record of its last update that predictions read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch

from roundelay.ir.rule import NO_PREDICTOR
from roundelay.runtime.gradients import Gradients
from roundelay.runtime.optimizer.stage_optimizer import RateTable, groups_of
from roundelay.weight_prediction import LastStep, Outlook, needs_displacement, needs_gradient, predict

Tensors = dict[str, torch.Tensor]


@final
class PredictedWeights:
    """Computes and caches the predicted weights of a stage.

    Args:
        setting: name of the predictor.
        optimizer: the stage's optimizer.
        parameters: the stage's parameters, by name.
        rates: learning rates of coming updates.
        gradients: gradients of the current batch.
        last: every parameter's last update, if the run is resumed.
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
        self._cached: dict[str, tuple[tuple[int, int, int], Tensors]] = {}  # opcode to (key, weights)
        self.last = dict(last)
        """Every parameter's last update, as far as a prediction reads it."""

    def weights(self, opcode: str, version: int, distance: int) -> Tensors:
        """Return the stage's weights predicted ``distance`` updates ahead.

        They are cached until the update; with ``partial``, until the next backward.

        Args:
            opcode: ``forward`` or ``backward``; each has one cached prediction, as they may alternate.
            version: updates made.
            distance: updates to predict ahead, at least 1.
        """
        rows = self._gradients.rows if self._setting == "partial" else 0
        key = version, distance, rows
        if opcode not in self._cached or self._cached[opcode][0] != key:
            self._cached.pop(opcode, None)  # first, so that old and new are not held at one time
            equal = [weights for other, weights in self._cached.values() if other == key]  # of the other opcode
            self._cached[opcode] = key, equal[0] if equal else self._predict(version, distance)
        return self._cached[opcode][1]

    def held(self) -> tuple[list[Tensors], list[torch.Tensor | None]]:
        """Return the predicted weights that are kept, and what is kept of every parameter's last update."""
        of_steps = [tensor for last in self.last.values() for tensor in (last.displacement, last.gradient)]
        return [weights for _, weights in self._cached.values()], of_steps

    def clear(self) -> None:
        """Drop cached predictions, after an update."""
        self._cached = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what later predictions read of the optimizer step inside this context."""
        if self._setting == NO_PREDICTOR:
            yield
            return
        groups = [(group, p) for _, group, p in groups_of(self._optimizer)]
        before, consumed = {}, {}  # copies: the step may modify either in place
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
                        else (float(group["lr"]),) * distance  # the optimizer's own step may have set it
                    ),
                    last=self.last.get(name),
                    begun=begun.get(name),
                )
        return predicted
