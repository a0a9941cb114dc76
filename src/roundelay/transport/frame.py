"""Messages as bytes: what a transport between processes puts on the wire, and how it reads it back.

A frame is a fixed head and a body. A message's body is its header, a description of each value, then the bytes of the
tensors that travel inside the frame. Other tensors follow the frame, straight from and into their own memory. A frame
holds numbers only: reading one runs no code of the sender's, and every number that sizes memory is checked.
"""

from __future__ import annotations

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
MAX_REASON_BYTES = 1000

MESSAGE, MESSAGE_APART, GRANT, END, ACK = range(1, 6)
"""Kinds of frames; the body of MESSAGE_APART does not fit into the frame and follows it."""

_HEAD = struct.Struct("<BBHiII")
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


def encode(message: Message) -> tuple[bytearray, list[torch.Tensor]]:
    """The frame of `message` and, in order, the bytes that follow it: a body too long for it, tensors likewise."""
    room = FRAME_BYTES - _HEAD.size - 8 * len(message.header) - sum(map(_description_bytes, message.values))
    body = bytearray(struct.pack(f"<{len(message.header)}q", *message.header))
    inside: list[torch.Tensor] = []
    apart: list[torch.Tensor] = []
    for value in message.values:
        fits = isinstance(value, torch.Tensor) and value.nbytes <= max(0, room)
        body += _describe(value, fits)
        if isinstance(value, torch.Tensor) and value.nbytes:
            room -= value.nbytes if fits else 0
            (inside if fits else apart).append(bytes_of(value))
    head = Head(MESSAGE, len(message.header), 0, message.channel, len(message.values))
    if room < 0:  # then no tensor with any bytes is inside
        follows = torch.frombuffer(body, dtype=torch.uint8)
        return bytearray(_HEAD.pack(*head._replace(kind=MESSAGE_APART, length=len(body)))), [follows, *apart]
    length = len(body) + sum(part.numel() for part in inside)
    frame = bytearray(_HEAD.pack(*head._replace(length=length))) + body
    return _append(frame, inside), apart


def read_head(frame: bytearray) -> Head:
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
    """The message, and in order the still unfilled bytes of those of its tensors that follow the frame.

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
            tensor = reader.tensor()
            values.append(tensor)
            if tensor.nbytes:
                (inside if kind == _INSIDE else apart).append(bytes_of(tensor))
        else:
            values.append(reader.number(kind))
    for part in inside:
        part.copy_(reader.bytes(part.numel()))
    return Message(head.channel, header, tuple(values)), apart


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor that is not empty, as uint8."""
    return tensor.view(-1).view(torch.uint8)


@final
class _Reader:
    """A place in a body; every step checks that the body is long enough."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0
        self._tensor_bytes = 0

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

    def tensor(self) -> torch.Tensor:
        dtype, dimensions = self.take("<BB")
        if dtype >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
            raise _unreadable(f"dtype {dtype} with {dimensions} dimensions")
        shape = self.take(f"<{dimensions}q")
        if shape and min(shape) < 0:
            raise _unreadable(f"shape {shape}")
        self._tensor_bytes += math.prod(shape) * DTYPES[dtype].itemsize
        if max(shape, default=0) > MAX_MESSAGE_BYTES or self._tensor_bytes > MAX_MESSAGE_BYTES:
            raise _unreadable(f"shape {shape}, more than {MAX_MESSAGE_BYTES} bytes")
        return torch.empty(shape, dtype=DTYPES[dtype])

    def bytes(self, count: int) -> torch.Tensor:
        at, self._at = self._at, self._at + count
        if self._at > len(self._body):
            raise _unreadable(f"a body of {len(self._body)} bytes, too short")
        return torch.frombuffer(self._body, dtype=torch.uint8, offset=at, count=count)


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


def _append(frame: bytearray, parts: list[torch.Tensor]) -> bytearray:
    """`frame` and behind it the bytes of `parts`."""
    at = len(frame)
    frame.extend(bytes(sum(part.numel() for part in parts)))
    for part in parts:
        torch.frombuffer(frame, dtype=torch.uint8, offset=at, count=part.numel()).copy_(part)
        at += part.numel()
    return frame


def _unreadable(got: str) -> InternalError:
    return InternalError(
        "bytes from another worker",
        got=got,
        expected="a frame of this version of Roundelay",
        remedy="Run the same version of Roundelay on every worker.",
    )
