"""The layout of a message's body: the kind of each value, and dtype and shape of each tensor.

The messages of a channel have the same layout, so parsed layouts are cached.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.transport.endpoint import (
    DTYPE_NUMBERS,
    DTYPES,
    MAX_DIMENSIONS,
    MAX_MESSAGE_BYTES,
    MAX_VALUES,
    Value,
)

_NONE, _INT, _FLOAT, _INSIDE, _APART = range(5)
_NUMBER = {_INT: "q", _FLOAT: "d"}
_TENSOR = struct.Struct("<BBB")
_CACHED_BYTES = 1024
"""Longer layouts are not cached."""


@final
class TensorLayout(NamedTuple):
    """Shape, dtype and place of one tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    bytes_at: Callable[[int], ctypes.Array[ctypes.c_char]] | None
    """Maps the tensor's address to its bytes; None if it has none, or they are not inside the frame."""

    @property
    def apart(self) -> bool:
        """Whether it has bytes that are not inside the frame."""
        return self.nbytes > 0 and self.bytes_at is None


@final
class Layout(NamedTuple):
    """What follows the layout in a body.

    Args:
        numbers: format of the header and of the values that are numbers.
        tensors: in order.
        pick: selects the values in order from (*tensors, *numbers, None).
        inside_bytes: total bytes of the tensors inside the frame.
        apart: whether any tensor's bytes follow the frame.
    """

    numbers: struct.Struct
    tensors: tuple[TensorLayout, ...]
    pick: Callable[[tuple[Value, ...]], tuple[Value, ...]]
    inside_bytes: int
    apart: bool


def write(kinds: tuple[Any, ...], room: int) -> bytes:
    """Return the layout of values of these kinds, as bytes.

    Args:
        kinds: (dtype, shape) of a tensor, the type of another value.
        room: bytes that the frame has for the body without its header.
    """
    room -= sum([3 + 8 * len(kind[1]) if isinstance(kind, tuple) else 9 for kind in kinds])
    text = bytearray()
    for kind in kinds:
        if isinstance(kind, tuple):
            dtype, shape = kind
            nbytes = math.prod(shape) * dtype.itemsize
            fits = nbytes <= room
            room -= nbytes if fits else 0
            text += _TENSOR.pack(_INSIDE if fits else _APART, DTYPE_NUMBERS[dtype], len(shape))
            text += struct.pack(f"<{len(shape)}q", *shape)
        else:
            text.append(_INT if kind is int else _FLOAT if kind is float else _NONE)
    return bytes(text)


def read(text: bytes, header: int) -> Layout:
    """Parse the layout that `write` returned, for a header of `header` numbers.

    Raises:
        InternalError: it is no layout, or describes what no message has.
    """
    return (_read_cached if len(text) <= _CACHED_BYTES else _read)(text, header)


def _read(text: bytes, header: int) -> Layout:
    """As `read`; sizes that no message has are refused before memory is allocated for them."""
    kinds: list[int] = []
    tensors: list[TensorLayout] = []
    at = 0
    try:
        while at < len(text):
            kinds.append(text[at])
            if text[at] in (_INSIDE, _APART):
                kind, dtype, dimensions = _TENSOR.unpack_from(text, at)
                shape = struct.unpack_from(f"<{dimensions}q", text, at + _TENSOR.size)
                tensors.append(_tensor(kind, dtype, shape))
                at += _TENSOR.size + 8 * dimensions
            else:
                at += 1
    except struct.error:
        raise unreadable(f"a layout of {len(text)} bytes, too short") from None
    if len(kinds) > MAX_VALUES or max(kinds, default=0) > _APART:
        raise unreadable(f"{len(kinds)} values of kinds up to {max(kinds)}")
    if sum(tensor.nbytes for tensor in tensors) > MAX_MESSAGE_BYTES:
        raise unreadable(f"shapes {[tensor.shape for tensor in tensors]}, too big together")
    numbers = struct.Struct("<" + "q" * header + "".join([_NUMBER[kind] for kind in kinds if kind in _NUMBER]))
    inside_bytes = sum(t.nbytes for t in tensors if t.bytes_at is not None)
    apart = any(tensor.apart for tensor in tensors)
    return Layout(numbers, tuple(tensors), _picker(kinds, len(tensors)), inside_bytes, apart)


def _picker(kinds: list[int], tensors: int) -> Callable[[tuple[Value, ...]], tuple[Value, ...]]:
    """Return a getter of the values, in order, from (*tensors, *numbers, None)."""
    next_tensor, next_number = itertools.count(), itertools.count(tensors)
    none_at = tensors + sum([kind in _NUMBER for kind in kinds])
    indices = [
        none_at if kind == _NONE else next(next_number) if kind in _NUMBER else next(next_tensor) for kind in kinds
    ]
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    start = indices[0] if indices else 0
    return operator.itemgetter(slice(start, start + len(indices)))  # a tuple, too


def _tensor(kind: int, dtype: int, shape: tuple[int, ...]) -> TensorLayout:
    if dtype >= len(DTYPES) or len(shape) > MAX_DIMENSIONS:
        raise unreadable(f"dtype {dtype} with {len(shape)} dimensions")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    strides = tuple([math.prod([max(1, size) for size in shape[d + 1 :]]) for d in range(len(shape))])
    sizes = all(0 <= size <= MAX_MESSAGE_BYTES for size in shape)
    if not (sizes and nbytes <= MAX_MESSAGE_BYTES and max(strides, default=0) < 2**62):
        raise unreadable(f"shape {shape}, where no message has more than {MAX_MESSAGE_BYTES} bytes")
    bytes_at = (ctypes.c_char * nbytes).from_address if nbytes and kind == _INSIDE else None
    return TensorLayout(shape, strides, DTYPES[dtype], nbytes, bytes_at)


_read_cached = lru_cache(maxsize=1024)(_read)


def unreadable(got: str) -> InternalError:
    """The error for bytes that no worker of this version writes; `got` describes them."""
    return InternalError(
        "bytes from another worker",
        got=got,
        expected="a frame of this version of Roundelay",
        remedy="Run the same version of Roundelay on every worker.",
    )
