"""Frames that no worker of this version writes: noise, valid ones that were changed, layouts of what no message has."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import DTYPES, Message

SIZES = [0, 1, 2, 3, 255, 2**16, 2**31, 2**34, 2**34 + 1, 2**61, 2**62, 2**63 - 1, -1, -(2**31), -(2**63)]
INSIDE, APART = 3, 4


def tensor(kind: int, dtype: int, shape: list[int], dimensions: int | None = None) -> bytes:
    """The layout of a tensor, which may claim another number of dimensions than it has."""
    return struct.pack(f"<BBB{len(shape)}q", kind, dtype, len(shape) if dimensions is None else dimensions, *shape)


def frame(layout: bytes, rest: bytes = b"", header: int = 0, length: int | None = None, kind: int = 0) -> bytes:
    """A message with this layout and what follows it; `length` is what it claims of its body."""
    body = len(layout) + len(rest) if length is None else length
    kind = kind or (wire.MESSAGE if wire.HEAD_BYTES + body <= wire.FRAME_BYTES else wire.MESSAGE_APART)
    return struct.pack("<BBHiII", kind, header, 0, 0, len(layout), body) + layout + rest


def sent(message: Message) -> bytes:
    """The bytes of a message as they travel."""
    written, apart = wire.encode(message, 256)
    return bytes(written) + b"".join(bytes(part.reshape(-1).view(torch.uint8).numpy()) for part in apart)


@st.composite
def messages(draw: Any) -> bytes:
    """What a worker sends: small tensors of every dtype, inside the frame or behind it, and numbers."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4))
    tensors = [torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES))) for shape in shapes]
    numbers = draw(st.lists(st.none() | st.integers(-9, 9) | st.floats(allow_nan=False), max_size=4))
    values = draw(st.permutations([*tensors, *numbers]))
    return sent(Message(draw(st.integers(0, 3)), tuple(draw(st.lists(st.integers(-9, 9), max_size=3))), tuple(values)))


def _set(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda given: given[: at % (len(given) + 1)] + value + given[at % (len(given) + 1) + len(value) :]


CHANGES: st.SearchStrategy[Callable[[bytes], bytes]] = st.one_of(
    st.builds(_set, st.integers(0, 400), st.binary(min_size=1, max_size=2)),
    st.builds(_set, st.integers(0, 30), st.binary(min_size=1, max_size=2)),
    st.builds(
        lambda at, size: _set(at, size.to_bytes(8, "little", signed=True)), st.integers(16, 90), st.sampled_from(SIZES)
    ),
    st.builds(lambda at: lambda given: given[: at % (len(given) + 1)], st.integers(0, 400)),
    st.builds(lambda more: lambda given: given + more, st.binary(min_size=1, max_size=40)),
    st.builds(lambda at: lambda given: given[at % (len(given) + 1) :], st.integers(0, 60)),
)


@st.composite
def changed(draw: Any) -> bytes:
    """A message that was changed in a few places."""
    given: bytes = draw(messages())
    for change in draw(st.lists(CHANGES, min_size=1, max_size=3)):
        given = change(given)
    return given


@st.composite
def laid_out(draw: Any) -> bytes:
    """A frame whose layout has any shapes, dtypes and kinds."""
    kinds = st.sampled_from([0, 1, 2]).map(lambda kind: bytes([kind])) | st.binary(max_size=3)
    tensors = st.builds(
        tensor,
        st.sampled_from([INSIDE, APART]),
        st.integers(0, len(DTYPES) - 1) | st.integers(0, 255),
        st.lists(st.sampled_from(SIZES), max_size=4) | st.lists(st.sampled_from([0, 1, 2**34]), max_size=18),
        st.none() | st.integers(0, 255),
    )
    layout = b"".join(draw(st.lists(tensors | kinds, max_size=5)))
    rest = draw(st.binary(max_size=60))
    claimed = draw(st.none() | st.integers(0, 2**32 - 1))
    return frame(layout, rest, draw(st.integers(0, 255)), claimed, draw(st.integers(0, 8)))


FRAMES = st.one_of(st.binary(max_size=120), changed(), laid_out())
