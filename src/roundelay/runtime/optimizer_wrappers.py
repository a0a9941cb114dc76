"""An optimizer and those that it wraps (Lookahead, Muon beside AdamW): their groups and their states, each once."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

_DEEP = 3
"""Containers in containers up to which wrapped optimizers are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One optimizer among those of a job.

    Args:
        path: how the job's optimizer holds it, as ``.base`` or ``.optimizers[0]``; empty for itself.
        optimizer: the object.
    """

    path: str
    optimizer: torch.optim.Optimizer


def parts(optimizer: torch.optim.Optimizer) -> list[Part]:
    """The optimizer, and all that it holds in attributes, or in lists, tuples and dicts there; each once."""
    found: list[Part] = []
    _collect(Part("", optimizer), found)
    return found


def _collect(part: Part, found: list[Part]) -> None:
    if any(part.optimizer is other.optimizer for other in found):
        return
    found.append(part)
    for name, value in list(vars(part.optimizer).items()):
        if name not in ("state", "param_groups", "defaults"):
            for path, inner in _optimizers(f"{part.path}.{name}", value, _DEEP):
                _collect(Part(path, inner), found)


def _optimizers(path: str, value: Any, deep: int) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif deep and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _optimizers(f"{path}[{i}]", item, deep - 1)
    elif deep and isinstance(value, dict):
        for key, item in value.items():
            yield from _optimizers(f"{path}[{key!r}]", item, deep - 1)


def all_groups(optimizer: torch.optim.Optimizer) -> list[tuple[str, int, dict[str, Any]]]:
    """(path of the optimizer, index, group) of every group dict; one that several optimizers share, once."""
    made, seen = [], set()
    for part in parts(optimizer):
        for i, group in enumerate(part.optimizer.param_groups):
            if id(group) not in seen:
                seen.add(id(group))
                made.append((part.path, i, group))
    return made


def all_states(optimizer: torch.optim.Optimizer) -> list[tuple[str, MutableMapping[Any, Any]]]:
    """(path of the optimizer, its state by parameter) of every state; one that several optimizers share, once.

    A property that shows what wrapped optimizers hold is no state of its own.
    """
    made: list[tuple[str, MutableMapping[Any, Any]]] = []
    for part in parts(optimizer):
        state = vars(part.optimizer).get("state")
        if state is not None and not any(state is other for _, other in made):
            made.append((part.path, state))
    return made or [("", optimizer.state)]
