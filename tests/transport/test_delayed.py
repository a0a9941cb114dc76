"""The delayed transport changes the timing as much as the contract allows, and nothing else."""

from __future__ import annotations

import pytest
import torch

from roundelay.errors import DeadlineError
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Granted, Lost, Message
from roundelay.transport.memory import memory_endpoints
from tests.transport.delayed import DelayedEndpoint

DELAY_S = 0.01


def key(delivery: Delivery) -> tuple[int, int]:
    if isinstance(delivery, Arrived):
        return delivery.source, delivery.message.channel
    return delivery.source, delivery.channel if isinstance(delivery, Granted) else -1


def received(seed: int) -> list[Delivery]:
    """What worker 0 receives when workers 1 and 2 send on three channels, and 1 then aborts."""
    endpoints = memory_endpoints(3)
    for i in range(20):
        for source in (1, 2):
            endpoints[source].send(0, Message(i % 3, (i,), ()))
            endpoints[source].grant(0, 7)
    endpoints[1].abort("gone")
    delayed = DelayedEndpoint(endpoints[0], seed, DELAY_S)
    return [delayed.receive(5.0) for _ in range(81)]


@pytest.mark.parametrize("seed", range(5))
def test_channels_overtake_each_other_but_none_overtakes_itself(seed: int) -> None:
    got = received(seed)
    for source in (1, 2):
        for channel in range(3):
            mine = [one.message.header[0] for one in got if isinstance(one, Arrived) and key(one) == (source, channel)]
            assert mine == list(range(channel, 20, 3))
    in_order = [one.message.header[0] for one in got if isinstance(one, Arrived) and one.source == 2]
    assert in_order != sorted(in_order)
    assert [one.source for one in got] != [1, 1, 2, 2] * 20 + [1]


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_worker_is_lost_after_all_that_it_sent(seed: int) -> None:
    assert [type(one) for one in received(seed) if one.source == 1][-1] is Lost


def test_what_is_held_back_is_neither_received_nor_counted() -> None:
    a, b = memory_endpoints(2)
    delayed: Endpoint = DelayedEndpoint(b, seed=1, max_delay_s=1e6)
    a.send(1, Message(0, (), (torch.ones(4),)))
    with pytest.raises(DeadlineError):
        delayed.receive(0.02)
    assert (delayed.bytes_received, b.bytes_received) == ({}, {0: 16})


def test_without_delay_it_is_the_transport_itself() -> None:
    a, b = memory_endpoints(2)
    delayed = DelayedEndpoint(b, seed=0, max_delay_s=0.0)
    sent = [Message(i % 4, (i,), ()) for i in range(20)]
    for message in sent:
        a.send(1, message)
    assert [delayed.receive(1.0) for _ in sent] == [Arrived(0, message) for message in sent]
