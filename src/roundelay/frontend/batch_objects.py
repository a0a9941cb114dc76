"""Batches that are objects: dataclasses, the batches of PyTorch Geometric, a class of one's own with tensors in it.

An object is taken apart into its attributes where one of them holds a tensor, and put together again as a copy in which
they are others. Code that makes an object (``__init__``) does not run again.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_DEPTH = 4
"""Nesting of attributes and containers in which tensors are looked for."""

_NOT_OBJECTS = (
    *(str, bytes, int, float, complex, type(None), type, types.FunctionType, types.MethodType, types.ModuleType),
    *(torch.Tensor, np.ndarray, np.generic, torch.nn.Module, torch.device, torch.dtype, torch.Generator),
    *(Mapping, list, tuple, set, frozenset),
)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object of which one holds a tensor; empty for anything else, and if it holds itself."""
    if isinstance(value, _NOT_OBJECTS):
        return {}
    own = _attributes(value)
    if not any(_holds_tensor(item, _DEPTH) for item in own.values()):
        return {}
    return {} if any(_reaches(item, value, _DEPTH) for item in own.values()) else own


def with_attributes(value: Any, attributes: Mapping[str, Any]) -> Any:
    """A copy of an object with these in place of its own."""
    made = copy.copy(value)
    for name, item in attributes.items():
        if isinstance(getattr(made, "__dict__", None), dict) and name in made.__dict__:
            made.__dict__[name] = item
        else:
            object.__setattr__(made, name, item)  # in a slot
    return made


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _listed(getattr(kind, "__slots__", ()))]
    in_slots = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    entries = getattr(value, "__dict__", None)
    return in_slots | (dict(entries) if isinstance(entries, dict) else {})


def _listed(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return depth > 0 and any(_holds_tensor(item, depth - 1) for item in _inner(value))


def _reaches(value: Any, wanted: Any, depth: int) -> bool:
    return value is wanted or (depth > 0 and any(_reaches(item, wanted, depth - 1) for item in _inner(value)))


def _inner(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return [] if isinstance(value, _NOT_OBJECTS) else list(_attributes(value).values())
