"""Frames survive what a faulty sender may write into them."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import MAX_MESSAGE_BYTES, Message

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(NUMBERS, max_size=16), st.lists(st.none() | NUMBERS | st.floats(allow_nan=False), max_size=30))
def test_what_is_written_is_read(header: list[int], values: list[int | float | None]) -> None:
    message = Message(3, tuple(header), tuple(values))
    frame, apart = wire.encode(message)
    head = wire.read_head(frame)
    assert wire.decode(head, wire.body_of(head, frame)) == (message, [])
    assert apart == []


def test_tensors_travel_inside_the_frame_while_they_fit() -> None:
    small, big = torch.ones(1000), torch.ones(wire.FRAME_BYTES // 4)
    frame, apart = wire.encode(Message(0, (), (small, big, small)))
    assert len(frame) <= wire.FRAME_BYTES
    assert [part.data_ptr() for part in apart] == [big.data_ptr()]


@pytest.mark.parametrize("over", [0, 1])
def test_a_frame_is_never_longer_than_the_receiver_s_buffer(over: int) -> None:
    bare, _ = wire.encode(Message(0, (1,), (torch.empty(0, dtype=torch.uint8),)))
    room = wire.FRAME_BYTES - len(bare)
    frame, apart = wire.encode(Message(0, (1,), (torch.ones(room + over, dtype=torch.uint8),)))
    assert (len(frame), len(apart)) == ((wire.FRAME_BYTES, 0) if over == 0 else (len(bare), 1))


@given(st.binary(min_size=16, max_size=200))
def test_any_bytes_are_a_frame_or_refused(noise: bytes) -> None:
    frame = bytearray(noise) + bytearray(wire.FRAME_BYTES - len(noise))
    try:
        head = wire.read_head(frame)
    except InternalError:
        return
    assert head.kind in range(1, 8)


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_message_with_one_wrong_byte_is_read_or_refused(place: int, byte: int) -> None:
    frame, _ = wire.encode(Message(0, (1, 2), (1, None, torch.arange(20), 2.0, torch.ones(2, 3))))
    frame[place % len(frame)] = byte
    padded = frame + bytearray(wire.FRAME_BYTES - len(frame))
    try:
        head = wire.read_head(padded)
        wire.decode(head, wire.body_of(head, padded))
    except InternalError:
        return


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("more", [-100, -1, 1])
def test_a_body_of_another_length_than_it_describes_is_refused(more: int, inside: bool) -> None:
    frame, _ = wire.encode(Message(0, (1, 2), (torch.ones(20), 3.0)), wire.FRAME_BYTES if inside else 0)
    head = wire.read_head(frame)
    with pytest.raises(InternalError):
        wire.decode(head._replace(length=max(head.layout, head.length + more)), frame + bytes(1), wire.HEAD_BYTES)
    with pytest.raises(InternalError):
        wire.decode(head, frame[:-1], wire.HEAD_BYTES)


@pytest.mark.parametrize("shape", [(-1,), (MAX_MESSAGE_BYTES,), (2**40, 2**40), (0, 2**62)])
def test_a_shape_that_no_message_has_takes_no_memory(shape: tuple[int, ...]) -> None:
    description = struct.pack(f"<BBB{len(shape)}q", 4, 0, len(shape), *shape)
    head = wire.Head(wire.MESSAGE, layout=len(description), length=len(description))
    with pytest.raises(InternalError, match="shape"):
        wire.decode(head, memoryview(description))
