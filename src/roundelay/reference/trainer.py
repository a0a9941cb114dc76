"""One optimizer over the whole model, and every version of weights and optimizer state that is still needed.

The runtime has one optimizer per stage instead; comparing the two also shows that this makes no difference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map

from roundelay.reference.mesh import Division
from roundelay.reference.predict import Past
from roundelay.reference.run_inputs import Named, OptimizerFactory, SchedulerFactory, Tensors, use_threads


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to create the optimizer.

    Args:
        optimizer: creates an optimizer over named parameters.
        scheduler: creates a scheduler for an optimizer, stepped after every update; None for constant rates.
        start: loads the state at the run's first version into an optimizer; None for a new run.
        version: number of updates done before the run.
        numbers: metrics of the evaluations so far, for ``ReduceLROnPlateau``; its rate is constant during a run.
    """

    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    start: Callable[[Optimizer], None] | None
    version: int
    numbers: tuple[float, ...] = ()

    def build(self, named: Named) -> tuple[Optimizer, LRScheduler | None]:
        """Create optimizer and scheduler as of ``version``; a loaded state overrides the scheduler's rates."""
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
            step_once(optimizer, scheduler)
        if self.start is not None:
            self.start(optimizer)
        return optimizer, scheduler


def step_once(optimizer: Optimizer, scheduler: LRScheduler | None) -> list[float]:
    """Step optimizer and scheduler and return the learning rates of the step; without gradients, no weight changes."""
    optimizer.step()
    rates = [float(group["lr"]) for group in optimizer.param_groups]  # the user's optimizer may set them in its step
    if scheduler is not None:
        scheduler.step()
    return rates


@final
class Rates:
    """The learning rate of every update, from a second optimizer and scheduler that are stepped ahead of the run."""

    def __init__(self, recipe: Recipe, named: Named) -> None:
        self._named = [(n, torch.nn.Parameter(p.detach().clone(), p.requires_grad)) for n, p in named]
        self._optimizer, self._scheduler = recipe.build(self._named)
        self._first = recipe.version
        self._table = [self._current()]

    def at(self, name: str, update: int) -> float:
        """Return lr(u), the learning rate of the parameter's group for update number ``update``."""
        while self._first + len(self._table) <= update:
            with suppress(ValueError):  # after the end of a schedule of fixed length, its last rate is kept
                step_once(self._optimizer, self._scheduler)
            self._table.append(self._current())
        return self._table[update - self._first][name]

    def _current(self) -> dict[str, float]:
        return {name: float(group["lr"]) for name, group in groups_of(self._optimizer, self._named).items()}


def groups_of(optimizer: Optimizer, named: Named) -> dict[str, dict[str, Any]]:
    """Return the parameter group of every parameter that the optimizer has."""
    names = {id(parameter): name for name, parameter in named}
    return {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}


@dataclass(frozen=True, slots=True)
class Version:
    """W[u], and the part of S[u] that a prediction needs.

    Args:
        weights: every parameter of the model.
        pasts: of every parameter that the optimizer has.
    """

    weights: Tensors
    pasts: dict[str, Past]


@final
class Trainer:
    """Steps the optimizer and keeps the versions.

    Args:
        recipe: how to create the optimizer.
        named: every parameter of the model; updated in place.
        divisions: of those of which the optimizer has each holder's part instead.
        threads: intra-op threads with which each is updated; by default as many as are used.
    """

    def __init__(
        self,
        recipe: Recipe,
        named: Named,
        divisions: Mapping[str, Division] | None = None,
        threads: Mapping[str, int] | None = None,
    ) -> None:
        self.live = recipe.version
        self.versions: dict[int, Version] = {}
        self._named = named
        self._optimizer, self._scheduler = recipe.build(named)
        self._divisions = {} if divisions is None else divisions
        #: what the optimizer has of each parameter: itself, or its parts
        self._parts = {n: _divided(self._optimizer, p, self._divisions.get(n)) for n, p in named}
        own = {name: (threads or {}).get(name, torch.get_num_threads()) for name, _ in named}
        #: names of those that are updated with as many threads, by the number
        self._by_threads = {count: {n for n in own if own[n] == count} for count in sorted({*own.values()})}
        self._rates = None if recipe.scheduler is None else Rates(recipe, named)
        resumed = {name for name, p in named if p.requires_grad and recipe.start is not None}
        kind = type(self._optimizer)
        trained = groups_of(self._optimizer, self._updated)
        pasts = {n: Past(kind, {}, {}, n in resumed, None, None, 0.0) for n in trained}
        self.versions[self.live] = Version(self._weights(), self._snapshot(pasts))

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """W[t+1], S[t+1] = Opt(W[t], S[t], gradients, lr(t)); ``grad`` of a parameter without gradient is None."""
        before = self.versions[self.live]
        group_rates: list[float] = []
        for count, names in self._by_threads.items():
            use_threads(count)
            self._set_gradients({name: gradient for name, gradient in gradients.items() if name in names})
            last = count == max(self._by_threads)
            group_rates = step_once(self._optimizer, self._scheduler if last else None)
        groups = zip(self._optimizer.param_groups, group_rates, strict=True)
        rate_of = {id(parameter): rate for group, rate in groups for parameter in group["params"]}
        rates = {name: rate_of[id(parameter)] for name, parameter in self._updated if id(parameter) in rate_of}
        for name, parameter in self._named:
            for part in self._parts[name]:
                part.grad = None
            if name in self._divisions:
                parameter.copy_(self._divisions[name].joined(self._parts[name]))
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
            else past  # the optimizer skipped it: its last update is an earlier one
            for name, past in before.pasts.items()
        }
        self.live += 1
        self.versions[self.live] = Version(after, self._snapshot(pasts))

    def _set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizer copies of these gradients, and none of other parameters."""
        for name, parts in self._parts.items():
            of_parts = self._divided(name, gradients[name]) if name in gradients else [None] * len(parts)
            for part, gradient in zip(parts, of_parts, strict=True):
                part.grad = None if gradient is None else gradient.clone()

    def forget(self, oldest: int) -> None:
        """Drop the versions below ``oldest``."""
        for version in [u for u in self.versions if u < oldest]:
            del self.versions[version]

    def rate(self, name: str, version: int, i: int) -> float:
        """Return r_i, the learning rate of the i-th update after ``version``."""
        if self._rates is None:
            return self.versions[version].pasts[name].number("lr")
        return self._rates.at(name, version + i - 1)

    def parameters(self) -> Tensors:
        """Return every parameter of the model with its current weights."""
        return {name: parameter.detach() for name, parameter in self._named}

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """Return every parameter that requires gradients, with its current weights."""
        return [(name, parameter.detach()) for name, parameter in self._named if parameter.requires_grad]

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of every parameter that has any."""
        states = {name: self._state(name) for name, _ in self._named}
        return {name: state for name, state in states.items() if state}

    def rejoin(self) -> None:
        """Let the optimizer have whole parameters again, with their states: at the end, for who made it."""
        each = _states(self._optimizer)
        for name, parameter in self._named:
            if name in self._divisions:
                parts = self._parts[name]
                whole = [self._joined(name, state) for state in each]
                _put(self._optimizer, parts, [parameter])
                for state, own in zip(each, whole, strict=True):
                    for part in parts:
                        state.pop(part, None)
                    if own:
                        state[parameter] = own
        self._divisions, self._parts = {}, {name: [parameter] for name, parameter in self._named}

    def _state(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter, in the parameter's shape where it is in that of its parts."""
        return self._joined(name, self._optimizer.state)

    def _joined(self, name: str, state: MutableMapping[Any, Any]) -> dict[str, Any]:
        parts = self._parts[name]
        each = [state.get(part, {}) for part in parts]
        if name not in self._divisions:
            return dict(each[0])

        def whole(*own: Any) -> Any:
            of_parts = all(isinstance(v, torch.Tensor) and v.shape == p.shape for v, p in zip(own, parts, strict=True))
            return self._divisions[name].joined(own) if of_parts else own[0]

        return dict(tree_map(whole, each[0], *each[1:]))

    def _divided(self, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        return self._divisions[name].parts(whole) if name in self._divisions else [whole]

    @property
    def _updated(self) -> Named:
        """What the optimizer has, each with its parameter's name."""
        return [(name, part) for name, parts in self._parts.items() for part in parts]

    def _weights(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self._named}

    def _snapshot(self, pasts: dict[str, Past]) -> dict[str, Past]:
        """Return ``pasts`` with copies of the current hyperparameters and optimizer state."""
        groups = groups_of(self._optimizer, self._updated)
        return {
            name: replace(
                past,
                group=copy.deepcopy({key: value for key, value in groups[name].items() if key != "params"}),
                state=copy.deepcopy(self._state(name)),
            )
            for name, past in pasts.items()
        }


def _divided(
    optimizer: Optimizer, parameter: torch.nn.Parameter, division: Division | None
) -> list[torch.nn.Parameter]:
    """Let the optimizer have the parts of a parameter in its place, with its state; returns what it has."""
    if division is None:
        return [parameter]
    parts = [torch.nn.Parameter(part.clone(), parameter.requires_grad) for part in division.parts(parameter.detach())]
    _put(optimizer, [parameter], parts)
    for state in _states(optimizer):
        whole = state.pop(parameter, None)
        for i, part in enumerate(parts if whole else ()):

            def own(value: Any, i: int = i) -> Any:
                is_whole = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                return copy.deepcopy(division.parts(value)[i] if is_whole else value)

            state[part] = tree_map(own, whole)
    return parts


def _optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those that it wraps, each once."""
    found: list[Optimizer] = []
    waiting: list[Any] = [optimizer]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, Optimizer) and not any(one is other for other in found):
            found.append(one)
            waiting += [value for key, value in vars(one).items() if key not in ("state", "param_groups", "defaults")]
        elif isinstance(one, (list, tuple, dict)):
            waiting += list(one.values() if isinstance(one, dict) else one)
    return found


def _states(optimizer: Optimizer) -> list[MutableMapping[Any, Any]]:
    """Their states by parameter, each once; not what a property makes of them."""
    states: list[MutableMapping[Any, Any]] = []
    for one in _optimizers(optimizer):
        state = vars(one).get("state")
        if state is not None and not any(state is other for other in states):
            states.append(state)
    return states


def _put(optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter], others: Sequence[torch.nn.Parameter]) -> None:
    """Put others in the place of an optimizer's parameters, which stand side by side in a group."""
    lists = {id(group["params"]): group["params"] for one in _optimizers(optimizer) for group in one.param_groups}
    for own in lists.values():
        at = next((i for i, p in enumerate(own) if p is parameters[0]), None)
        if at is not None:
            own[at : at + len(parameters)] = others
