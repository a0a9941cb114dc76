"""Read, write and compare the values of :class:`roundelay.reach.reachable_state.StateSlot`."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

ITERATORS: tuple[type, ...] = (itertools.count, itertools.cycle, type(iter(())), type(iter([])), type(iter(range(0))))
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
"""The value of a slot that holds nothing."""


def set_contents(container: Any, items: Any) -> None:
    """Replace all items of a list, a set or a deque."""
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(items)


def in_cell(cell: Any) -> Any:
    """The value in a closure's cell, :data:`MISSING` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def set_cell(cell: Any, value: Any) -> None:
    """Set the value in a closure's cell, unless it is :data:`MISSING`."""
    if value is not MISSING:
        cell.cell_contents = value


def generator_state(generator: Any) -> Any:
    """A copy of a random number generator's state."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state(**({"legacy": False} if isinstance(generator, np.random.RandomState) else {}))


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a random number generator's state."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def address(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Address of a tensor or an array whose values can be copied and restored; else 0."""
    if isinstance(value, np.ndarray):
        return 0 if value.dtype.hasobject or not value.flags.writeable else value.__array_interface__["data"][0]
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return 0
    if value.is_meta or value.is_inference() or value.is_quantized or not value.numel():
        return 0
    storage = value.untyped_storage()
    return storage.data_ptr() if storage.nbytes() >= value.nbytes else 0  # else it is expanded


def copied_values(value: Any) -> Any:
    """A copy of a tensor or an array."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()


def copy_into(holder: Any, value: Any) -> None:
    """Overwrite the values of a tensor or an array."""
    if isinstance(holder, torch.Tensor):
        inner = holder.data  # writes do not count as a new version: a backward may follow
        if inner.shape == value.shape:
            inner.copy_(value)
        else:
            holder.data = value
    else:
        holder[...] = value


def same_values(one: Any, two: Any) -> bool:
    """Whether two tensors or arrays have the same bits."""
    if isinstance(one, torch.Tensor):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        one, two = (tensor.detach() for tensor in (one, two))
        if torch.equal(one, two):
            return True
        one, two = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (one, two))
        return torch.equal(one, two)  # also for NaN
    return bool(one.shape == two.shape and one.tobytes() == two.tobytes())


def same(one: Any, two: Any) -> bool:
    """Whether two slot values are the same object, equal numbers or strings, or containers of the same items."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, (bool, int, float, complex, str, bytes)):
        return bool(one == two or (one != one and two != two))
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, ITERATORS):
        return bool(one.__reduce__() == two.__reduce__())
    if isinstance(one, types.MethodType):
        return bool(one == two)
    if isinstance(one, torch.Tensor) and one.dtype is torch.uint8 and one.ndim == 1:  # a generator's state
        return torch.equal(one, two)
    if isinstance(one, dict) and "bit_generator" in one:
        return repr(one) == repr(two)
    return False


READERS: dict[str, Callable[[Any], Any]] = {
    "contents": tuple,
    "state": generator_state,
    "values": copied_values,
    "cell": in_cell,
}
"""How a slot is read whose value is not an attribute or an entry, by kind."""

WRITERS: dict[str, Callable[[Any, Any], None]] = {
    "contents": set_contents,
    "state": set_generator_state,
    "values": copy_into,
    "cell": set_cell,
}
"""How it is written."""
