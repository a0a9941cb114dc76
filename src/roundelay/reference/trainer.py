"""One optimizer over the whole model, and every version of weights and state that is still needed.

Unlike the runtime, which has an optimizer per stage: that the two agree is part of what a comparison shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from roundelay.reference.predict import Past
from roundelay.reference.setting import Named, OptimizerFactory, SchedulerFactory, Tensors


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the optimizer is made.

    Args:
        optimizer: named parameters to an optimizer over all of them.
        scheduler: optimizer to a scheduler, stepped after every update; None for constant rates.
        start: puts the state at the run's first version into an optimizer; None at a fresh start.
        version: number of updates done before the run.
        numbers: what evaluations have said, for a scheduler that waits for it; its rate then stays.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    start: Callable[[Optimizer], None] | None
    version: int
    numbers: tuple[float, ...] = ()

    def made(self, named: Named) -> tuple[Optimizer, LRScheduler | None]:
        """Optimizer and scheduler as they stand at ``version``; a loaded state overrides the scheduler's rates."""
        optimizer = self.optimizer(named)
        modes = [getattr(optimizer, mode, None) for mode in ("train", "eval")]
        if all(map(callable, modes)):  # a schedule-free optimizer
            modes[0]()  # type: ignore[misc]
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            for number in self.numbers:
                scheduler.step(number)
            scheduler = None
        for _ in range(self.version if scheduler is not None else 0):
            _pass(optimizer, scheduler)
        if self.start is not None:
            self.start(optimizer)
        return optimizer, scheduler


def _pass(optimizer: Optimizer, scheduler: LRScheduler | None) -> list[float]:
    """Let one update pass; without gradients it changes nothing but the scheduler's place. The rates it was made at."""
    optimizer.step()
    rates = [float(group["lr"]) for group in optimizer.param_groups]  # which a step of the person's own may write
    if scheduler is not None:
        scheduler.step()
    return rates


@final
class Rates:
    """The learning rate of every update, read off an optimizer and scheduler that are stepped ahead of the run."""

    def __init__(self, recipe: Recipe, named: Named) -> None:
        self._named = [(n, torch.nn.Parameter(p.detach().clone(), p.requires_grad)) for n, p in named]
        self._optimizer, self._scheduler = recipe.made(self._named)
        self._first = recipe.version
        self._table = [self._now()]

    def at(self, name: str, update: int) -> float:
        """lr(u) of the parameter's group at update number ``update``."""
        while self._first + len(self._table) <= update:
            with suppress(ValueError):  # a schedule of fixed length has no rate behind its end: its last one goes on
                _pass(self._optimizer, self._scheduler)
            self._table.append(self._now())
        return self._table[update - self._first][name]

    def _now(self) -> dict[str, float]:
        return {name: float(group["lr"]) for name, group in groups_of(self._optimizer, self._named).items()}


def groups_of(optimizer: Optimizer, named: Named) -> dict[str, dict[str, Any]]:
    """The group of every parameter that the optimizer holds."""
    names = {id(parameter): name for name, parameter in named}
    return {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}


@dataclass(frozen=True, slots=True)
class Version:
    """W[u], and what a prediction needs of S[u].

    Args:
        weights: every parameter of the model.
        pasts: every parameter that the optimizer holds.
    """

    weights: Tensors
    pasts: dict[str, Past]


@final
class Trainer:
    """Steps the optimizer and keeps the versions.

    Args:
        recipe: how the optimizer is made.
        named: every parameter of the model; updated in place.
    """

    def __init__(self, recipe: Recipe, named: Named) -> None:
        self.live = recipe.version
        self.versions: dict[int, Version] = {}
        self._named = named
        self._optimizer, self._scheduler = recipe.made(named)
        self._rates = None if recipe.scheduler is None else Rates(recipe, named)
        resumed = {name for name, p in named if p.requires_grad and recipe.start is not None}
        kind = type(self._optimizer)
        pasts = {n: Past(kind, {}, {}, n in resumed, None, None, 0.0) for n in groups_of(self._optimizer, named)}
        self.versions[self.live] = Version(self._weights(), self._snapshot(pasts))

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """W[t+1], S[t+1] = Opt(W[t], S[t], gradients, lr(t)); a parameter without gradient has none at all."""
        before = self.versions[self.live]
        for name, parameter in self._named:
            parameter.grad = gradients[name].clone() if name in gradients else None
        made_at = _pass(self._optimizer, self._scheduler)
        groups = zip(self._optimizer.param_groups, made_at, strict=True)
        of = {id(parameter): rate for group, rate in groups for parameter in group["params"]}
        rates = {name: of[id(parameter)] for name, parameter in self._named if id(parameter) in of}
        for _, parameter in self._named:
            parameter.grad = None
        after = self._weights()
        pasts = {
            name: replace(
                past,
                updated=True,
                gradient=gradients[name],
                displacement=before.weights[name] - after[name],
                last_rate=rates[name],
            )
            if name in gradients
            else past  # the optimizer passed over it: its last update is still the one before
            for name, past in before.pasts.items()
        }
        self.live += 1
        self.versions[self.live] = Version(after, self._snapshot(pasts))

    def forget(self, oldest: int) -> None:
        """Drop the versions below ``oldest``."""
        for version in [u for u in self.versions if u < oldest]:
            del self.versions[version]

    def rate(self, name: str, version: int, i: int) -> float:
        """r_i: the learning rate of the i-th update after ``version``."""
        if self._rates is None:
            return self.versions[version].pasts[name].number("lr")
        return self._rates.at(name, version + i - 1)

    def parameters(self) -> Tensors:
        """Every parameter of the model, as it stands."""
        return {name: parameter.detach() for name, parameter in self._named}

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter that asks for gradients, as it stands."""
        return [(name, parameter.detach()) for name, parameter in self._named if parameter.requires_grad]

    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of every parameter that has any."""
        found = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._named}
        return {name: dict(state) for name, state in found.items() if state}

    def _weights(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self._named}

    def _snapshot(self, pasts: dict[str, Past]) -> dict[str, Past]:
        """``pasts`` with copies of hyperparameters and optimizer state as they stand."""
        groups, parameters = groups_of(self._optimizer, self._named), dict(self._named)
        return {
            name: replace(
                past,
                group=copy.deepcopy({key: value for key, value in groups[name].items() if key != "params"}),
                state=copy.deepcopy(dict(self._optimizer.state.get(parameters[name], {}))),
            )
            for name, past in pasts.items()
        }
