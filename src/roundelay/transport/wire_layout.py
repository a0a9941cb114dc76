"""What a message's body is made of, as bytes and as plain data: the kind of each value, dtype and shape of each tensor.

The messages of a channel look alike, so layouts are read once and remembered: a pure function's results.
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
_REMEMBERED_BYTES = 1024
"""Longer layouts are not kept."""


@final
class TensorLayout(NamedTuple):
    """A tensor as it is laid out."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    bytes_at: Callable[[int], ctypes.Array[ctypes.c_char]] | None
    """Its bytes, by address, if it has any and they are inside the frame."""

    @property
    def apart(self) -> bool:
        """Whether it has bytes that are not inside the frame."""
        return self.nbytes > 0 and self.bytes_at is None


@final
class Layout(NamedTuple):
    """What a body is made of, behind its layout.

    Args:
        numbers: the header, then the values that are numbers.
        tensors: in order.
        pick: the values in order, out of the tensors, then the numbers, then None.
        inside_bytes: of the tensors inside.
        apart: whether there are others.
    """

    numbers: struct.Struct
    tensors: tuple[TensorLayout, ...]
    pick: Callable[[tuple[Value, ...]], tuple[Value, ...]]
    inside_bytes: int
    apart: bool


def write(kinds: tuple[Any, ...], room: int) -> bytes:
    """The layout of values of these kinds: (dtype, shape) of a tensor, the type of another.

    `room` bytes of a frame are there for the body without its header.
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
    """What `write` described, behind so many numbers of a header.

    Raises:
        InternalError: it is no layout, or describes what no message has.
    """
    return (_read if len(text) <= _REMEMBERED_BYTES else _read_anew)(text, header)


def _read_anew(text: bytes, header: int) -> Layout:
    """What `write` described, refused before it takes memory that no message would fill."""
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
    """Picks each value out of a row of all tensors, then all numbers, then None."""
    each_tensor, each_number = itertools.count(), itertools.count(tensors)
    behind = tensors + sum([kind in _NUMBER for kind in kinds])
    places = [
        behind if kind == _NONE else next(each_number) if kind in _NUMBER else next(each_tensor) for kind in kinds
    ]
    if len(places) > 1:
        return operator.itemgetter(*places)
    start = places[0] if places else 0
    return operator.itemgetter(slice(start, start + len(places)))  # a tuple, too


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


_read = lru_cache(maxsize=1024)(_read_anew)


def unreadable(got: str) -> InternalError:
    """What to raise for bytes that `got` describes and no worker of this version writes."""
    return InternalError(
        "bytes from another worker",
        got=got,
        expected="a frame of this version of Roundelay",
        remedy="Run the same version of Roundelay on every worker.",
    )
