"""The wire format of messages between processes: encoding and decoding of frames.

A frame is a fixed head and a body. A message's body is its layout (the kind of each value, dtype and shape of each
tensor), its header and numbers, then the bytes of the tensors that travel inside the frame. Other tensors follow the
frame, sent from and received into their own memory. A frame holds numbers only: decoding it runs no code of the
sender's, and every number that sizes memory is checked.

The messages of a channel have the same head and layout, so these are encoded and decoded once and cached.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.transport import wire_layout as layouts
from roundelay.transport.endpoint import MAX_HEADER, Message
from roundelay.transport.wire_layout import Layout, unreadable

FRAME_BYTES = layouts.MAX_INSIDE_BYTES
"""Most bytes of a frame; a message's tensors travel inside it while they fit."""

MAX_BODY_BYTES = 2**24
MAX_REASON_BYTES = 2**15
"""Longer reasons of an abort, such as a traceback, are cut."""

MESSAGE, MESSAGE_APART, GRANT, END, ACK, MORE = range(1, 7)
"""Kinds of frames. The body of MESSAGE_APART does not fit into the frame and follows it; MORE announces bytes in a ring
of shared memory."""

MESSAGES = (MESSAGE, MESSAGE_APART)

_HEAD = struct.Struct("<BBHiII")
HEAD_BYTES = _HEAD.size
_CACHED_VALUES = 32
"""Templates of messages with more values are not cached."""


@final
class Head(NamedTuple):
    """The first bytes of every frame.

    Args:
        kind: of the frame.
        header: how many numbers a message's header has.
        number: the channel of a message or credit; the bytes that MORE announces.
        layout: bytes of a message's layout.
        length: bytes of the body.
    """

    kind: int
    header: int = 0
    unused: int = 0
    number: int = 0
    layout: int = 0
    length: int = 0


class _Template(NamedTuple):
    """What messages with values of the same kinds have in common.

    Args:
        start: head and layout, encoded.
        layout: what follows.
        whole: whether everything but the separate tensors fits into a frame.
    """

    start: bytes
    layout: Layout
    whole: bool


def grant_frame(channel: int) -> bytearray:
    """Encode one credit of `channel`."""
    return bytearray(_HEAD.pack(GRANT, 0, 0, channel, 0, 0))


def end_frame(reason: str) -> bytearray:
    """Encode the end of a link, after which only ACK may follow; with a reason it is an abort."""
    body = reason.encode()[:MAX_REASON_BYTES]
    return bytearray(_HEAD.pack(*Head(END, length=len(body))) + body)


def ack_frame() -> bytearray:
    """Encode the answer to END."""
    return bytearray(_HEAD.pack(*Head(ACK)))


def more_frame(count: int) -> bytearray:
    """Announce `count` more bytes in the ring."""
    return bytearray(_HEAD.pack(MORE, 0, 0, count, 0, 0))


def encode(message: Message, room: int = FRAME_BYTES) -> tuple[bytearray, list[torch.Tensor]]:
    """Return the frame of `message` and, in order, what follows it: a body that is too long for it, then tensors.

    Tensors travel inside the frame while it stays within `room` bytes. Bytes are copied by address: copying them with
    tensor operations would cost more than everything else.
    """
    channel, header, values = message
    kinds: list[Any] = []
    tensors: list[torch.Tensor] = []
    numbers: list[int | float] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            kinds.append((value.dtype, value.shape))
            tensors.append(value)
        else:
            kinds.append(type(value))
            if value is not None:
                numbers.append(value)
    template = _cached_template if len(values) <= _CACHED_VALUES else _template
    start, layout, whole = template(channel, len(header), tuple(kinds), room)
    parts: list[bytes | ctypes.Array[ctypes.c_char]] = [start, layout.numbers.pack(*header, *numbers)]
    apart = []
    for tensor, (_, _, _, nbytes, bytes_at) in zip(tensors, layout.tensors, strict=True):
        if bytes_at is not None:
            parts.append(bytes_at(tensor.data_ptr()))
        elif nbytes:
            apart.append(tensor)
    frame = bytearray().join(parts)
    if whole:
        return frame, apart
    return frame[:HEAD_BYTES], [torch.frombuffer(frame, dtype=torch.uint8, offset=HEAD_BYTES), *apart]


def read_head(frame: bytearray) -> Head:
    """Decode the head of a frame.

    Raises:
        InternalError: a field is out of range.
    """
    return head_of(bytes(frame[:HEAD_BYTES]))


@lru_cache(maxsize=1024)
def head_of(frame: bytes) -> Head:
    """Decode the bytes of a head. Raises as `read_head` does."""
    head = Head._make(_HEAD.unpack(frame))
    kind, header, _, number, layout, length = head
    least, most = (1, MAX_BODY_BYTES) if kind == MESSAGE_APART else (0, FRAME_BYTES - HEAD_BYTES)
    if (
        not (MESSAGE <= kind <= MORE and number >= 0 and layout <= length and least <= length <= most)
        or header > MAX_HEADER
    ):
        raise unreadable(str(head))
    return head


def unexpected(head: Head) -> InternalError:
    """The error for a frame that must not come at this point."""
    return unreadable(f"{head}, out of place")


def body_of(head: Head, frame: bytearray) -> memoryview:
    """The body of `frame`, not copied."""
    return memoryview(frame)[HEAD_BYTES : HEAD_BYTES + head.length]


def decode(head: Head, data: bytes | bytearray | memoryview, at: int = 0) -> tuple[Message, list[torch.Tensor]]:
    """Decode the message whose body begins at `at`; also return its tensors that follow the frame, not filled yet.

    Raises:
        InternalError: the body is not one that `encode` writes.
    """
    count, end = head.header, at + head.length
    numbers_at = at + head.layout
    text = bytes(data[at:numbers_at])
    layout = layouts.read(text, count)
    at = numbers_at + layout.numbers.size
    if at + layout.inside_bytes != end or end > len(data):
        raise unreadable(f"a body of {head.length} bytes, where other lengths are described")
    numbers = layout.numbers.unpack_from(data, numbers_at)
    tensors = []
    for shape, strides, dtype, nbytes, bytes_at in layout.tensors:
        # allocated by torch: the alignment decides which kernel runs, and so the last bit of a result
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        tensors.append(tensor)
        if bytes_at is not None:
            bytes_at(tensor.data_ptr()).raw = bytes(data[at : at + nbytes])
            at += nbytes
    message = Message(head.number, numbers[:count], layout.pick((*tensors, *numbers[count:], None)))
    return message, _apart(layout, tensors) if layout.apart else []


def apart_bytes(head: Head, data: memoryview) -> int:
    """Bytes of the tensors that follow the frame with body `data`. Raises as `decode` does."""
    layout = layouts.read(bytes(data[: head.layout]), head.header)
    return sum([tensor.nbytes for tensor in layout.tensors if tensor.apart])


def _apart(layout: Layout, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that follow their frame."""
    return [t for t, described in zip(tensors, layout.tensors, strict=True) if described.apart]


def _template(channel: int, header: int, kinds: tuple[Any, ...], room: int) -> _Template:
    """The template of messages on `channel` with `header` numbers in the header and values of these kinds."""
    text = layouts.write(kinds, room - HEAD_BYTES - 8 * header)
    layout = layouts.read(text, header)
    length = len(text) + layout.numbers.size + layout.inside_bytes
    whole = HEAD_BYTES + length <= FRAME_BYTES  # if not, no tensor's bytes are inside
    head = _HEAD.pack(MESSAGE if whole else MESSAGE_APART, header, 0, channel, len(text), length)
    return _Template(head + text, layout, whole)


_cached_template = lru_cache(maxsize=1024)(_template)
