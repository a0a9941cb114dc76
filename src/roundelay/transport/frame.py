"""Messages as bytes: what a transport between processes puts on the wire, and how it reads it back.

A frame is a fixed head and a body. A message's body is its header, its layout (the kind of each value, dtype and shape
of each tensor), its numbers, then the bytes of the tensors that travel inside the frame. Other tensors follow the
frame, straight from and into their own memory. A frame holds numbers only: reading one runs no code of the sender's,
and every number that sizes memory is checked.

The messages of a channel look alike, so layouts are written and read once and remembered: a pure function's results.
"""

from __future__ import annotations

import ctypes
import math
import struct
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.transport.contract import (
    DTYPE_NUMBERS,
    DTYPES,
    MAX_DIMENSIONS,
    MAX_HEADER,
    MAX_MESSAGE_BYTES,
    MAX_VALUES,
    Message,
    Value,
)

FRAME_BYTES = 65_536
"""Longest frame; a message's tensors travel inside it while they fit."""

MAX_BODY_BYTES = 2**24
MAX_REASON_BYTES = 2**15
"""A longer reason of an abort, a traceback perhaps, is cut."""

MESSAGE, MESSAGE_APART, GRANT, END, ACK = range(1, 6)
"""Kinds of frames; the body of MESSAGE_APART does not fit into the frame and follows it."""

_HEAD = struct.Struct("<BBHiII")
HEAD_BYTES = _HEAD.size
_HEADERS = tuple(struct.Struct(f"<{count}q") for count in range(MAX_HEADER + 1))
_NONE, _INT, _FLOAT, _INSIDE, _APART = range(5)
_NUMBER = {_INT: "q", _FLOAT: "d"}
_TENSOR = struct.Struct("<BBB")
_REMEMBERED_VALUES, _REMEMBERED_BYTES = 32, 1024
"""The layouts of longer messages are not kept."""


@final
class Head(NamedTuple):
    """The first bytes of every frame; `layout` and `length`, of the body, in bytes."""

    kind: int
    header: int = 0
    unused: int = 0
    channel: int = 0
    layout: int = 0
    length: int = 0


class _Tensor(NamedTuple):
    """A tensor as it is laid out."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    inside: bool


class _Layout(NamedTuple):
    """What a message is made of: the kind of each value, the numbers, and the tensors, in order."""

    kinds: tuple[int, ...]
    numbers: struct.Struct
    tensors: tuple[_Tensor, ...]
    inside_bytes: int


def grant_frame(channel: int) -> bytearray:
    """One credit of `channel`."""
    return bytearray(_HEAD.pack(GRANT, 0, 0, channel, 0, 0))


def end_frame(reason: str) -> bytearray:
    """The sender's last word but ACK; a reason makes it an abort."""
    body = reason.encode()[:MAX_REASON_BYTES]
    return bytearray(_HEAD.pack(*Head(END, length=len(body))) + body)


def ack_frame() -> bytearray:
    """The answer to END."""
    return bytearray(_HEAD.pack(*Head(ACK)))


def encode(message: Message, *, inline: bool = True) -> tuple[bytearray, list[torch.Tensor]]:
    """The frame of `message` and, in order, what follows it: a body too long for it, then tensors likewise.

    With `inline` tensors travel inside the frame while they fit, without it none does. Bytes are copied by address:
    the same through tensor operations costs more than all the rest.
    """
    header, values = message.header, message.values
    kinds = tuple([(v.dtype, v.shape) if isinstance(v, torch.Tensor) else type(v) for v in values])
    write, read = (_write, _read) if len(values) <= _REMEMBERED_VALUES else (_write_anew, _read_anew)
    text = write(kinds, FRAME_BYTES - HEAD_BYTES - 8 * len(header) if inline else -1)
    layout = read(text)
    parts = [_HEADERS[len(header)].pack(*header), text]
    if layout.numbers.size:
        parts.append(layout.numbers.pack(*[v for v in values if isinstance(v, int | float)]))
    apart = []
    if layout.tensors:
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        for tensor, described in zip(tensors, layout.tensors, strict=True):
            if described.inside:
                parts.append(ctypes.string_at(tensor.data_ptr(), described.nbytes))
            elif described.nbytes:
                apart.append(tensor)
    length = sum(map(len, parts))
    if HEAD_BYTES + length > FRAME_BYTES:  # then no tensor with any bytes is inside
        follows = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        head = _HEAD.pack(MESSAGE_APART, len(header), 0, message.channel, len(text), length)
        return bytearray(head), [follows, *apart]
    head = _HEAD.pack(MESSAGE, len(header), 0, message.channel, len(text), length)
    return bytearray().join((head, *parts)), apart


def read_head(frame: bytearray | memoryview) -> Head:
    """The head of a frame.

    Raises:
        InternalError: it announces what no head may announce.
    """
    head = Head._make(_HEAD.unpack_from(frame))
    most = MAX_BODY_BYTES if head.kind == MESSAGE_APART else FRAME_BYTES - HEAD_BYTES
    if not (MESSAGE <= head.kind <= ACK and head.channel >= 0 and head.layout <= head.length <= most):
        raise _unreadable(str(head))
    if head.header > MAX_HEADER:
        raise _unreadable(str(head))
    return head


def body_of(head: Head, frame: bytearray) -> memoryview:
    """The body inside `frame`."""
    return memoryview(frame)[HEAD_BYTES : HEAD_BYTES + head.length]


def decode(head: Head, body: memoryview) -> tuple[Message, list[torch.Tensor]]:
    """The message, and in order those of its tensors that follow the frame, still unfilled.

    Raises:
        InternalError: the body is not one that `encode` writes.
    """
    numbers_at = 8 * head.header + head.layout
    if numbers_at > len(body):
        raise _unreadable(f"a body of {len(body)} bytes, too short")
    text = bytes(body[8 * head.header : numbers_at])
    layout = (_read if len(text) <= _REMEMBERED_BYTES else _read_anew)(text)
    inside_at = numbers_at + layout.numbers.size
    if inside_at + layout.inside_bytes != len(body):
        raise _unreadable(f"a body of {len(body)} bytes, where {inside_at + layout.inside_bytes} are described")
    header = _HEADERS[head.header].unpack_from(body)
    tensors = [torch.empty_strided(t.shape, t.strides, dtype=t.dtype) for t in layout.tensors]
    if layout.inside_bytes:
        _fill(tensors, layout, body[inside_at:])
    apart = [
        t for t, described in zip(tensors, layout.tensors, strict=True) if described.nbytes and not described.inside
    ]
    if len(tensors) == len(layout.kinds):
        return Message(head.channel, header, tuple(tensors)), apart
    return Message(head.channel, header, _values(layout, tensors, layout.numbers.unpack_from(body, numbers_at))), apart


def _values(layout: _Layout, tensors: list[torch.Tensor], numbers: tuple[int | float, ...]) -> tuple[Value, ...]:
    """Tensors and numbers, each in its place."""
    each_tensor, each_number = iter(tensors), iter(numbers)
    return tuple(
        [
            None if kind == _NONE else next(each_number) if kind in _NUMBER else next(each_tensor)
            for kind in layout.kinds
        ]
    )


def _fill(tensors: list[torch.Tensor], layout: _Layout, body: memoryview) -> None:
    """Copy into torch's own memory: its alignment decides which kernel runs, and so the last bit of a result."""
    at = 0
    for tensor, described in zip(tensors, layout.tensors, strict=True):
        if described.inside:
            ctypes.memmove(tensor.data_ptr(), bytes(body[at : at + described.nbytes]), described.nbytes)
            at += described.nbytes


def _write_anew(kinds: tuple[Any, ...], room: int) -> bytes:
    """The layout of values of these kinds: (dtype, shape) of a tensor, the type of another.

    `room` bytes of a frame are there for the body without its header; negative: no tensor travels inside.
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


def _read_anew(text: bytes) -> _Layout:
    """The layout that `_write_anew` wrote, refused before it takes memory that no message would fill."""
    kinds: list[int] = []
    tensors: list[_Tensor] = []
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
        raise _unreadable(f"a layout of {len(text)} bytes, too short") from None
    if len(kinds) > MAX_VALUES or max(kinds, default=0) > _APART:
        raise _unreadable(f"{len(kinds)} values of kinds up to {max(kinds)}")
    if sum(tensor.nbytes for tensor in tensors) > MAX_MESSAGE_BYTES:
        raise _unreadable(f"shapes {[tensor.shape for tensor in tensors]}, too big together")
    numbers = struct.Struct("<" + "".join([_NUMBER[kind] for kind in kinds if kind in _NUMBER]))
    return _Layout(tuple(kinds), numbers, tuple(tensors), sum(t.nbytes for t in tensors if t.inside))


def _tensor(kind: int, dtype: int, shape: tuple[int, ...]) -> _Tensor:
    if dtype >= len(DTYPES) or len(shape) > MAX_DIMENSIONS:
        raise _unreadable(f"dtype {dtype} with {len(shape)} dimensions")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    strides = tuple([math.prod([max(1, size) for size in shape[d + 1 :]]) for d in range(len(shape))])
    sizes = all(0 <= size <= MAX_MESSAGE_BYTES for size in shape)
    if not (sizes and nbytes <= MAX_MESSAGE_BYTES and max(strides, default=0) < 2**62):
        raise _unreadable(f"shape {shape}, where no message has more than {MAX_MESSAGE_BYTES} bytes")
    return _Tensor(shape, strides, DTYPES[dtype], nbytes, kind == _INSIDE)


_write, _read = lru_cache(maxsize=1024)(_write_anew), lru_cache(maxsize=1024)(_read_anew)


def _unreadable(got: str) -> InternalError:
    return InternalError(
        "bytes from another worker",
        got=got,
        expected="a frame of this version of Roundelay",
        remedy="Run the same version of Roundelay on every worker.",
    )
