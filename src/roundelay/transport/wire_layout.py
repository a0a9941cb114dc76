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
_TENSOR = struct.Struct("<BB")
_CACHED_BYTES = 1024
"""Longer layouts are not cached."""

MAX_INSIDE_BYTES = 65_536
"""Most bytes of the tensors inside a frame."""

_MAX_SPAN_BYTES = 2**62
"""Most bytes of a tensor if sizes of 0 are taken as 1: torch multiplies sizes before it comes to one of 0."""


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
            text.append(_INSIDE if fits else _APART)
            text += struct.pack(f"<BB{len(shape)}q", DTYPE_NUMBERS[dtype], len(shape), *shape)
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
    """As `read`; what no message has is refused where it stands, before memory is allocated for it or what follows."""
    kinds: list[int] = []
    tensors: list[TensorLayout] = []
    at = inside_bytes = all_bytes = 0
    while at < len(text):
        kind = text[at]
        if kind > _APART or len(kinds) == MAX_VALUES:
            raise unreadable(f"value {len(kinds):,} of kind {kind}")
        kinds.append(kind)
        at += 1
        if kind in (_INSIDE, _APART):
            tensor, at = _tensor_at(text, at, kind)
            tensors.append(tensor)
            all_bytes += tensor.nbytes
            inside_bytes += tensor.nbytes if kind == _INSIDE else 0
            if all_bytes > MAX_MESSAGE_BYTES or inside_bytes > MAX_INSIDE_BYTES:
                raise unreadable(f"tensors of {all_bytes:,} bytes, {inside_bytes:,} of them in a frame")
    numbers = struct.Struct("<" + "q" * header + "".join([_NUMBER[kind] for kind in kinds if kind in _NUMBER]))
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


def _tensor_at(text: bytes, at: int, kind: int) -> tuple[TensorLayout, int]:
    """The tensor whose dtype stands at `at`, and where the next value begins."""
    try:
        dtype, dimensions = _TENSOR.unpack_from(text, at)
        at += _TENSOR.size
        if dtype >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
            raise unreadable(f"dtype {dtype} with {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}q", text, at)
    except struct.error:
        raise unreadable(f"a layout of {len(text)} bytes, too short") from None
    return _tensor(kind, DTYPES[dtype], shape), at + 8 * dimensions


def _tensor(kind: int, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorLayout:
    nbytes = math.prod(shape) * dtype.itemsize
    spans = [max(1, size) for size in shape]
    strides = tuple([math.prod(spans[d + 1 :]) for d in range(len(shape))])
    sizes = all(0 <= size <= MAX_MESSAGE_BYTES for size in shape)
    if not (sizes and nbytes <= MAX_MESSAGE_BYTES and math.prod(spans) * dtype.itemsize < _MAX_SPAN_BYTES):
        raise unreadable(f"shape {shape}, where no message has more than {MAX_MESSAGE_BYTES} bytes")
    bytes_at = (ctypes.c_char * nbytes).from_address if nbytes and kind == _INSIDE else None
    return TensorLayout(shape, strides, dtype, nbytes, bytes_at)


_read_cached = lru_cache(maxsize=1024)(_read)


def unreadable(got: str) -> InternalError:
    """The error for bytes that no worker of this version writes; `got` describes them."""
    return InternalError(
        "bytes from another worker",
        got=got,
        expected="a frame of this version of Roundelay",
        remedy="Run the same version of Roundelay on every worker.",
    )
