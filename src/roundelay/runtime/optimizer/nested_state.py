"""Converts optimizer state with lists and dicts of tensors to flat entries that a checkpoint can hold, and back.

An entry ``Q`` that is a list of two tensors becomes ``Q#0``, ``Q#1``, and ``roundelay.tree Q``, which describes their
structure in JSON. Entries that are tensors or plain values stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from roundelay.errors import JobError

_TREE = "roundelay.tree "

_PLAIN = (int, float, bool, str, type(None))


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as flat entries.

    Raises:
        JobError: a value is of a type that cannot be stored.
    """
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, (list, tuple, dict)):
            flat[key] = _checked(key, value)
            continue
        leaves: list[Any] = []
        flat[_TREE + key] = json.dumps(_tree(key, value, leaves))
        flat |= {f"{key}#{number}": leaf for number, leaf in enumerate(leaves)}
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The state whose flat entries these are."""
    trees = {key.removeprefix(_TREE): json.loads(text) for key, text in flat.items() if key.startswith(_TREE)}
    state = {key: value for key, value in flat.items() if not key.startswith(_TREE)}
    nested = {key: _value(tree, key, state) for key, tree in trees.items()}
    return state | nested


def _tree(key: str, value: Any, leaves: list[Any]) -> Any:
    """The structure of a value: a leaf's number, or a kind with its items. Appends to ``leaves`` in order."""
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise _unknown(key, "a dict with keys that are not text")
        return {"dict": [[name, _tree(key, item, leaves)] for name, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_tree(key, item, leaves) for item in value]}
    leaves.append(_checked(key, value))
    return len(leaves) - 1


def _value(tree: Any, key: str, flat: dict[str, Any]) -> Any:
    """The value with this structure; takes its leaves out of ``flat``."""
    if isinstance(tree, int):
        return flat.pop(f"{key}#{tree}")
    ((kind, items),) = tree.items()
    if kind == "dict":
        return {name: _value(item, key, flat) for name, item in items}
    values = [_value(item, key, flat) for item in items]
    return tuple(values) if kind == "tuple" else values


def _checked(key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
        raise _unknown(key, f"a value of type {type(value).__name__}")
    return value


def _unknown(key: str, got: str) -> JobError:
    return JobError(
        f"Job(optimizer=...), its state {key!r}",
        got=got,
        expected="tensors, numbers, text or None, and lists, tuples and dicts of these",
        remedy="Use an optimizer whose state consists of these: checkpoints can hold nothing else.",
    )


def same_value(one: Any, two: Any) -> bool:
    """Whether two tensors or plain values have the same type, shape and value, where NaN equals NaN.

    Tensors may be on different devices.
    """
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        if one.dtype != two.dtype or one.shape != two.shape:
            return False
        two = two.to(one.device)
        return torch.equal(one, two) or bool(((one == two) | ((one != one) & (two != two))).all())
    return type(one) is type(two) and bool(one == two or (one != one and two != two))
