"""An optimizer and those that it wraps (Lookahead; Muon together with AdamW): their groups and states, each once."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

_MAX_DEPTH = 3
"""Nesting of containers up to which wrapped optimizers are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldOptimizer:
    """A job's optimizer, or one that it wraps.

    Args:
        path: from the job's optimizer, as ``.base`` or ``.optimizers[0]``; empty for itself.
        optimizer: the optimizer.
    """

    path: str
    optimizer: torch.optim.Optimizer


def all_optimizers(optimizer: torch.optim.Optimizer) -> list[HeldOptimizer]:
    """The optimizer and all that it holds in attributes, also in lists, tuples and dicts there; each once."""
    optimizers: list[HeldOptimizer] = []
    _collect(HeldOptimizer("", optimizer), optimizers)
    return optimizers


def _collect(held: HeldOptimizer, found: list[HeldOptimizer]) -> None:
    if any(held.optimizer is other.optimizer for other in found):
        return
    found.append(held)
    for name, value in list(vars(held.optimizer).items()):
        if name not in ("state", "param_groups", "defaults"):
            for path, inner in _optimizers(f"{held.path}.{name}", value, _MAX_DEPTH):
                _collect(HeldOptimizer(path, inner), found)


def _optimizers(path: str, value: Any, depth: int) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif depth and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _optimizers(f"{path}[{i}]", item, depth - 1)
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _optimizers(f"{path}[{key!r}]", item, depth - 1)


def all_groups(optimizer: torch.optim.Optimizer) -> list[tuple[str, int, dict[str, Any]]]:
    """(path of the optimizer, index, group) of every group; a shared one is listed once."""
    groups, seen = [], set()
    for held in all_optimizers(optimizer):
        for i, group in enumerate(held.optimizer.param_groups):
            if id(group) not in seen:
                seen.add(id(group))
                groups.append((held.path, i, group))
    return groups


def all_states(optimizer: torch.optim.Optimizer) -> list[tuple[str, MutableMapping[Any, Any]]]:
    """(path of the optimizer, its state by parameter) of every state; a shared one is listed once.

    A property that returns the state of wrapped optimizers does not count.
    """
    states: list[tuple[str, MutableMapping[Any, Any]]] = []
    for held in all_optimizers(optimizer):
        state = vars(held.optimizer).get("state")
        if state is not None and not any(state is other for _, other in states):
            states.append((held.path, state))
    return states or [("", optimizer.state)]
