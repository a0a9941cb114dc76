"""Messages through a ring: any sizes, any interleaving of its two ends, and interruptions in the middle of a copy."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.transport import frame as wire
from roundelay.transport.contract import Arrived, Message
from roundelay.transport.ring import HEAD, LEAST_BYTES, TAIL, Ring
from roundelay.transport.stream import CHUNK_BYTES, Ended, Inlet, Outlet


class Pipe:
    """Both ends of one ring in one thread."""

    def __init__(self, size: int = LEAST_BYTES) -> None:
        self.ring = Ring(size)
        self.told = {"arrived": 0, "freed": 0}
        self.outlet = Outlet(self.ring, lambda: self.tell("arrived"))
        self.inlet = Inlet(5, self.ring, lambda: self.tell("freed"))

    def tell(self, what: str) -> None:
        self.told[what] += 1

    def send(self, message: Message) -> bool:
        return self.outlet.put(*wire.encode(message, inline=False))


def made(numbers: list[int]) -> Message:
    tensors = [torch.full((n,), n % 251, dtype=torch.uint8) for n in numbers]
    return Message(len(numbers), (len(numbers),), (len(numbers), *tensors, None))


def same(a: Message, b: Message) -> bool:
    pairs = list(zip(a.values, b.values, strict=True))
    return (a.channel, a.header) == (b.channel, b.header) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y for x, y in pairs
    )


SIZES = st.lists(st.sampled_from([0, 1, 7, 4096, LEAST_BYTES - 40, LEAST_BYTES, 3 * LEAST_BYTES, 400_000]), max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, max_size=12), st.integers(0, 2**32))
def test_whatever_is_sent_arrives_once_whole_and_in_order(sizes: list[list[int]], seed: int) -> None:
    chance, pipe = random.Random(seed), Pipe()
    messages, got = [made(numbers) for numbers in sizes], []
    for message in messages:
        pipe.send(message)
        for _ in range(chance.randrange(3)):
            got.append(pipe.inlet.read())
            if chance.random() < 0.5:
                pipe.outlet.flush()
    for _ in range(200):
        pipe.outlet.flush()
        got.append(pipe.inlet.read())
    arrived = [one for one in got if one is not None]
    assert len(arrived) == len(messages)
    for one, message in zip(arrived, messages, strict=True):
        assert isinstance(one, Arrived)
        assert one.source == 5
        assert same(one.message, message)
    assert pipe.ring.counters[HEAD] == pipe.ring.counters[TAIL]


def test_the_end_comes_behind_what_was_sent_before_it() -> None:
    pipe = Pipe()
    pipe.send(made([10]))
    pipe.outlet.put(wire.end_frame(""))
    assert isinstance(pipe.inlet.read(), Arrived)
    assert isinstance(pipe.inlet.read(), Ended)


def test_a_frame_that_no_ring_carries_is_refused() -> None:
    pipe = Pipe()
    pipe.outlet.put(wire.grant_frame(3))
    with pytest.raises(InternalError, match="a message or an end"):
        pipe.inlet.read()


def test_a_receiver_is_told_of_a_long_message_while_it_is_copied() -> None:
    pipe = Pipe(4 * CHUNK_BYTES)
    pipe.send(made([3 * CHUNK_BYTES]))
    assert pipe.told["arrived"] >= 3


@pytest.mark.parametrize("wanted", [True, False])
def test_a_sender_is_told_of_room_when_it_asked(wanted: bool) -> None:
    pipe = Pipe()
    assert pipe.send(made([LEAST_BYTES, 10]))
    pipe.outlet.want_room(wanted)
    assert not pipe.outlet.has_room
    pipe.inlet.read()
    pipe.inlet.read()
    assert pipe.outlet.has_room
    assert (pipe.told["freed"] > 0) == wanted


@pytest.mark.parametrize("at", range(6))
def test_an_interruption_while_copying_leaves_nothing_out_and_nothing_twice(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipe()
    write, calls = Ring.write, iter(range(1000))

    def interrupted(ring: Ring, position: int, address: int, count: int) -> None:
        write(ring, position, address, count)
        if next(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(Ring, "write", interrupted)
    message = made([100_000, 5, 200_000])

    def pass_on() -> None:
        pipe.send(message)
        for _ in range(20):
            pipe.inlet.read()
            pipe.outlet.flush()

    with pytest.raises(KeyboardInterrupt):
        pass_on()
    got = []
    for _ in range(20):
        pipe.outlet.flush()
        got.append(pipe.inlet.read())
    arrived = [one for one in got if one is not None]
    assert len(arrived) == 1
    assert isinstance(arrived[0], Arrived)
    assert same(arrived[0].message, message)


def test_what_is_sealed_drops_what_waits_and_what_comes() -> None:
    pipe = Pipe()
    assert pipe.send(made([2 * LEAST_BYTES]))
    assert pipe.outlet.seal(1.0)
    assert not pipe.outlet.waits
    before = pipe.ring.counters[TAIL]
    assert not pipe.send(made([1]))
    pipe.outlet.flush()
    assert pipe.ring.counters[TAIL] == before


@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    pipe = Pipe()
    pipe.ring.put(0, bytearray(noise))
    pipe.ring.counters[TAIL] = len(noise)
    with contextlib.suppress(InternalError):  # and by nothing else
        while pipe.inlet.read() is not None:
            pass


@pytest.mark.parametrize("tail", [LEAST_BYTES + 1, 2**63])
def test_a_counter_that_cannot_be_is_refused(tail: int) -> None:
    pipe = Pipe()
    pipe.ring.counters[TAIL] = tail
    with pytest.raises(InternalError, match="bytes in it"):
        pipe.inlet.read()


@pytest.mark.parametrize("size", [LEAST_BYTES // 2, LEAST_BYTES + 4096])
def test_a_ring_has_a_size_that_its_places_fit(size: int) -> None:
    with pytest.raises(InternalError, match="power of two"):
        Ring(size)


def test_a_body_longer_than_any_frame_comes_in_pieces() -> None:
    pipe = Pipe()
    message = Message(0, (), tuple(float(math.sin(i)) for i in range(60_000)))
    pipe.send(message)
    got = None
    for _ in range(100):
        pipe.outlet.flush()
        got = got or pipe.inlet.read()
    assert got == Arrived(5, message)
