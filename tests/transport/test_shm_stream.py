"""Messages through pipe and ring: any sizes, any interleaving of the ends, interruptions in the middle of a copy."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import select
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import Arrived, Delivery, Granted, Message
from roundelay.transport.shm_resources import MIN_RING_BYTES, Pipe, Ring
from roundelay.transport.shm_stream import CHUNK_BYTES, FrameReader, FrameWriter

PIPE_BYTES = 4096  # a narrow one: a page


class Link:
    """Both ends of one link in one thread."""

    def __init__(self, size: int = MIN_RING_BYTES, pipe_bytes: int = PIPE_BYTES) -> None:
        self.pipe, self.ring = Pipe(), Ring(size)
        fcntl.fcntl(self.pipe.writing, fcntl.F_SETPIPE_SZ, pipe_bytes)
        self.come: deque[Delivery] = deque()
        self.outlet = FrameWriter(self.pipe.writing.fileno(), self.ring)
        self.inlet = FrameReader(5, self.pipe.reading.fileno(), self.ring, self.come.append)

    def send(self, message: Message, room: int = 2048) -> bool:
        return self.outlet.put(*wire.encode(message, room))

    def read(self) -> bool:
        return self.inlet.read()

    def close(self) -> None:
        self.pipe.reading.close()
        self.pipe.writing.close()
        self.ring.close()


@contextmanager
def linked(size: int = MIN_RING_BYTES, pipe_bytes: int = PIPE_BYTES) -> Iterator[Link]:
    with contextlib.closing(Link(size, pipe_bytes)) as link:
        yield link


@pytest.fixture
def link() -> Iterator[Link]:
    with linked() as made:
        yield made


def made(numbers: list[int]) -> Message:
    tensors = [torch.full((n,), n % 251, dtype=torch.uint8) for n in numbers]
    return Message(len(numbers), (len(numbers),), (len(numbers), *tensors, None))


def same(a: Delivery, b: Message) -> bool:
    assert isinstance(a, Arrived)
    assert a.source == 5
    pairs = list(zip(a.message.values, b.values, strict=True))
    return (a.message.channel, a.message.header) == (b.channel, b.header) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y for x, y in pairs
    )


def exchange(link: Link, count: int = 100) -> None:
    """Both ends go on until nothing is left."""
    for _ in range(count):
        link.outlet.flush()
        link.read()


SIZES = st.lists(
    st.sampled_from([0, 1, 7, 1500, 4096, MIN_RING_BYTES - 40, MIN_RING_BYTES, 3 * MIN_RING_BYTES, 400_000]), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, max_size=12), st.integers(0, 2**32), st.sampled_from([0, 2048, 20_000]))
def test_whatever_is_sent_arrives_once_whole_and_in_order(sizes: list[list[int]], seed: int, room: int) -> None:
    chance = random.Random(seed)
    messages = [made(numbers) for numbers in sizes]
    credits = 0
    with linked() as link:
        for message in messages:
            link.send(message, room)
            if chance.random() < 0.3:
                link.outlet.put(wire.grant_frame(7))
                credits += 1
            for _ in range(chance.randrange(3)):
                link.read()
                if chance.random() < 0.5:
                    link.outlet.flush()
        exchange(link, 400)
        assert not link.outlet.waits
        assert link.come.count(Granted(5, 7)) == credits
        come = [delivery for delivery in link.come if isinstance(delivery, Arrived)]
        assert len(come) == len(messages)
        assert all(map(same, come, messages))


def test_the_end_comes_behind_what_was_sent_before_it(link: Link) -> None:
    link.send(made([10]))
    link.outlet.put(wire.end_frame(""))
    assert not link.read()
    assert link.inlet.ended
    assert len(link.come) == 1


def test_a_pipe_that_ends_without_a_word_has_not_ended_well(link: Link) -> None:
    link.send(made([10]))
    link.outlet.put(wire.encode(made([20]))[0][:30])
    link.pipe.writing.close()
    assert link.read()
    assert not link.read()
    assert not link.inlet.ended
    assert len(link.come) == 1


@pytest.mark.parametrize("frame", [wire.ack_frame(), wire.more_frame(1), wire.more_frame(2**31 - 1)])
def test_a_frame_that_has_no_place_here_is_refused(frame: bytearray, link: Link) -> None:
    link.outlet.put(frame)
    with pytest.raises(InternalError):
        link.read()


def test_a_message_before_the_last_one_is_whole_is_refused(link: Link) -> None:
    frame, _ = wire.encode(made([4096]), 0)
    link.outlet.put(frame + frame)
    with pytest.raises(InternalError, match="out of place"):
        link.read()


def test_a_receiver_is_told_of_a_long_message_while_it_is_copied() -> None:
    with linked(4 * CHUNK_BYTES) as link:
        link.send(made([3 * CHUNK_BYTES]))
        told = os.read(link.pipe.reading.fileno(), 4096)
        assert told.count(bytes(wire.more_frame(CHUNK_BYTES))) == 3


def test_a_frame_that_comes_in_pieces_is_put_together(link: Link) -> None:
    messages = [made([9000]), made([3])]
    assert link.send(messages[0], 20_000)
    link.send(messages[1])
    link.read()
    assert not link.come
    exchange(link)
    assert all(map(same, link.come, messages))
    assert len(link.come) == 2


def test_a_short_message_is_written_at_once_and_whole() -> None:
    with linked(pipe_bytes=2**16) as link:
        assert not link.send(made([9000]), 10_000)
        link.read()
        assert len(link.come) == 1
        assert link.ring.freed.take() == 0


def test_a_sender_is_woken_when_the_ring_has_room(link: Link) -> None:
    assert link.send(made([MIN_RING_BYTES, 10_000]))
    assert not link.outlet.pipe_full
    assert not select.select([link.outlet.room_fd], [], [], 0.0)[0]
    link.read()
    assert select.select([link.outlet.room_fd], [], [], 0.0)[0]
    exchange(link)
    assert len(link.come) == 1
    assert not link.outlet.waits


def test_nothing_in_the_ring_is_overwritten_before_it_is_read(link: Link) -> None:
    """The sender wraps around while the receiver has read nothing, then a part."""
    messages = [made([30_000 + i]) for i in range(9)]
    for message in messages:
        link.send(message, 0)
        link.outlet.flush()
    exchange(link)
    assert all(map(same, link.come, messages))
    assert len(link.come) == len(messages)


def test_a_sender_that_waits_for_the_pipe_says_so(link: Link) -> None:
    while not link.send(made([1000])):
        assert not link.outlet.pipe_full
    assert link.outlet.pipe_full
    link.read()
    link.outlet.flush()
    assert not link.outlet.pipe_full
    assert not link.outlet.waits


@pytest.mark.parametrize("at", range(6))
def test_an_interruption_while_copying_leaves_nothing_out_and_nothing_twice(
    at: int, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = Ring.write, iter(range(1000))

    def interrupted(ring: Ring, position: int, address: int, count: int) -> None:
        write(ring, position, address, count)
        if next(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(Ring, "write", interrupted)
    message = made([100_000, 5, 200_000])

    def pass_on() -> None:
        link.send(message, 0)
        exchange(link)

    with pytest.raises(KeyboardInterrupt):
        pass_on()
    exchange(link)
    assert len(link.come) == 1
    assert same(link.come[0], message)


def test_what_is_sealed_drops_what_waits_and_what_comes(link: Link) -> None:
    assert link.send(made([2 * MIN_RING_BYTES]))
    assert link.outlet.seal(1.0)
    assert not link.outlet.waits
    link.read()
    assert not link.send(made([1]))
    link.outlet.flush()
    exchange(link)
    assert not link.come


def test_what_nobody_reads_is_dropped(link: Link) -> None:
    while not link.send(made([1000])):
        pass
    link.pipe.reading.close()
    assert link.outlet.waits
    link.outlet.flush()
    assert not link.outlet.waits
    assert not link.send(made([1000]))


@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    with linked() as link:
        os.write(link.pipe.writing.fileno(), noise)
        with contextlib.suppress(InternalError):  # and by nothing else
            link.read()


@given(st.integers(0, 600), st.integers(0, 255), st.booleans())
def test_a_message_with_one_wrong_byte_is_read_or_refused(place: int, byte: int, apart: bool) -> None:
    with linked() as link:
        tensors = (torch.arange(20), 2.0, torch.ones(2, 3))
        frame, _ = wire.encode(Message(0, (1, 2), (1, None, *tensors)), 0 if apart else 4096)
        frame[place % len(frame)] = byte
        os.write(link.pipe.writing.fileno(), frame + wire.more_frame(184))
        with contextlib.suppress(InternalError):
            link.read()


@pytest.mark.parametrize("size", [MIN_RING_BYTES // 2, MIN_RING_BYTES + 4096])
def test_a_ring_has_a_size_that_its_places_fit(size: int) -> None:
    with pytest.raises(InternalError, match="power of two"):
        Ring(size)


def test_a_body_longer_than_any_frame_comes_in_pieces(link: Link) -> None:
    message = Message(0, (), tuple(float(math.sin(i)) for i in range(60_000)))
    link.send(message)
    exchange(link)
    assert list(link.come) == [Arrived(5, message)]
