"""Messages as bytes: what a transport between processes puts on the wire, and how it reads it back.

A frame is a fixed head and a body. A message's body is its header, a description of each value, then the bytes of the
tensors that travel inside the frame. Other tensors follow the frame, straight from and into their own memory. A frame
holds numbers only: reading one runs no code of the sender's, and every number that sizes memory is checked.
"""

from __future__ import annotations

import ctypes
import math
import struct
from typing import NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.transport.contract import (
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
_NONE, _INT, _FLOAT, _INSIDE, _APART = range(5)
_INT_VALUE, _FLOAT_VALUE, _TENSOR_VALUE = struct.Struct("<Bq"), struct.Struct("<Bd"), struct.Struct("<BBB")


@final
class Head(NamedTuple):
    """The first bytes of every frame; `length` is that of the body, in bytes."""

    kind: int
    header: int = 0
    unused: int = 0
    channel: int = 0
    values: int = 0
    length: int = 0


def grant_frame(channel: int) -> bytearray:
    """One credit of `channel`."""
    return bytearray(_HEAD.pack(*Head(GRANT, channel=channel)))


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
    room = FRAME_BYTES - _HEAD.size - 8 * len(message.header) - sum(map(_description_bytes, message.values))
    body = bytearray(struct.pack(f"<{len(message.header)}q", *message.header))
    inside: list[bytes] = []
    apart: list[torch.Tensor] = []
    for value in message.values:
        fits = inline and isinstance(value, torch.Tensor) and value.nbytes <= max(0, room)
        body += _describe(value, fits)
        if isinstance(value, torch.Tensor) and value.nbytes:
            if fits:
                room -= value.nbytes
                inside.append(ctypes.string_at(value.data_ptr(), value.nbytes))
            else:
                apart.append(value)
    head = Head(MESSAGE, len(message.header), 0, message.channel, len(message.values))
    if room < 0:  # then no tensor with any bytes is inside
        follows = torch.frombuffer(body, dtype=torch.uint8)
        return bytearray(_HEAD.pack(*head._replace(kind=MESSAGE_APART, length=len(body)))), [follows, *apart]
    body += b"".join(inside)
    return bytearray(_HEAD.pack(*head._replace(length=len(body)))) + body, apart


def read_head(frame: bytearray | memoryview) -> Head:
    """The head of a frame.

    Raises:
        InternalError: it announces what no head may announce.
    """
    head = Head(*_HEAD.unpack_from(frame))
    most = MAX_BODY_BYTES if head.kind == MESSAGE_APART else FRAME_BYTES - _HEAD.size
    if not (MESSAGE <= head.kind <= ACK and head.channel >= 0 and head.length <= most):
        raise _unreadable(str(head))
    if head.header > MAX_HEADER or head.values > MAX_VALUES:
        raise _unreadable(str(head))
    return head


def body_of(head: Head, frame: bytearray) -> memoryview:
    """The body inside `frame`."""
    return memoryview(frame)[_HEAD.size : _HEAD.size + head.length]


def decode(head: Head, body: memoryview) -> tuple[Message, list[torch.Tensor]]:
    """The message, and in order those of its tensors that follow the frame, still unfilled.

    Raises:
        InternalError: the body is not one that `encode` writes.
    """
    reader = _Reader(body)
    header = reader.take(f"<{head.header}q")
    values: list[Value] = []
    inside: list[torch.Tensor] = []
    apart: list[torch.Tensor] = []
    for _ in range(head.values):
        (kind,) = reader.take("<B")
        if kind in (_INSIDE, _APART):
            tensor = reader.tensor(inside=kind == _INSIDE)
            values.append(tensor)
            if tensor.nbytes:
                (inside if kind == _INSIDE else apart).append(tensor)
        else:
            values.append(reader.number(kind))
    for tensor in inside:
        reader.fill(tensor)
    return Message(head.channel, header, tuple(values)), apart


@final
class _Reader:
    """A place in a body; every step checks that the body is long enough."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0
        self._tensor_bytes = {True: 0, False: 0}  # inside the frame, and apart

    def take(self, layout: str) -> tuple[int, ...]:
        at, self._at = self._at, self._at + struct.calcsize(layout)
        if self._at > len(self._body):
            raise _unreadable(f"a body of {len(self._body)} bytes, too short")
        return struct.unpack_from(layout, self._body, at)

    def number(self, kind: int) -> Value:
        if kind == _NONE:
            return None
        if kind not in (_INT, _FLOAT):
            raise _unreadable(f"a value of kind {kind}")
        return self.take("<q" if kind == _INT else "<d")[0]

    def tensor(self, *, inside: bool) -> torch.Tensor:
        """A tensor as described; refused before it takes memory that its bytes would not fill."""
        dtype, dimensions = self.take("<BB")
        if dtype >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
            raise _unreadable(f"dtype {dtype} with {dimensions} dimensions")
        shape = self.take(f"<{dimensions}q")
        self._tensor_bytes[inside] += math.prod(shape) * DTYPES[dtype].itemsize
        most = len(self._body) if inside else MAX_MESSAGE_BYTES
        if not (all(0 <= size <= MAX_MESSAGE_BYTES for size in shape) and self._tensor_bytes[inside] <= most):
            raise _unreadable(f"shape {shape}, where there is room for {most} bytes")
        return torch.empty(shape, dtype=DTYPES[dtype])

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy into torch's own memory: its alignment decides which kernel runs, and so the last bit of a result."""
        at, self._at = self._at, self._at + tensor.nbytes
        if self._at > len(self._body):
            raise _unreadable(f"a body of {len(self._body)} bytes, too short")
        ctypes.memmove(tensor.data_ptr(), bytes(self._body[at : self._at]), tensor.nbytes)


def _description_bytes(value: Value) -> int:
    if isinstance(value, torch.Tensor):
        return _TENSOR_VALUE.size + 8 * value.dim()
    return 1 if value is None else _INT_VALUE.size


def _describe(value: Value, fits: bool) -> bytes:
    if isinstance(value, torch.Tensor):
        kind = _INSIDE if fits else _APART
        shape = struct.pack(f"<{value.dim()}q", *value.shape)
        return _TENSOR_VALUE.pack(kind, DTYPES.index(value.dtype), value.dim()) + shape
    if value is None:
        return bytes((_NONE,))
    return _INT_VALUE.pack(_INT, value) if isinstance(value, int) else _FLOAT_VALUE.pack(_FLOAT, value)


def _unreadable(got: str) -> InternalError:
    return InternalError(
        "bytes from another worker",
        got=got,
        expected="a frame of this version of Roundelay",
        remedy="Run the same version of Roundelay on every worker.",
    )
