"""The thread transport hands over; it does not copy."""

from __future__ import annotations

import threading

import pytest
import torch

from roundelay.errors import DeadlineError
from roundelay.transport.endpoint import Arrived, Granted, Message
from roundelay.transport.memory import memory_endpoints


def test_the_receiver_gets_the_sender_s_tensor_itself() -> None:
    a, b = memory_endpoints(2)
    tensor = torch.ones(3)
    a.send(1, Message(0, (), (tensor,)))
    delivery = b.receive(1.0)
    assert isinstance(delivery, Arrived)
    assert delivery.message.values[0] is tensor


def test_each_endpoint_knows_its_worker() -> None:
    assert [endpoint.worker for endpoint in memory_endpoints(4)] == [0, 1, 2, 3]


def test_a_credit_wakes_only_those_who_wait_for_one() -> None:
    a, b = memory_endpoints(2)
    threading.Timer(0.1, lambda: a.grant(1, 4)).start()
    with pytest.raises(DeadlineError):
        b.receive(0.4, credits=False)
    assert b.receive(0.0) == Granted(0, 4)
    threading.Timer(0.1, lambda: a.grant(1, 5)).start()
    assert b.receive(20.0) == Granted(0, 5)


def test_credits_that_are_here_are_taken_with_a_message() -> None:
    a, b = memory_endpoints(2)
    for channel in (4, 5, 4):
        a.grant(1, channel)
    a.send(1, Message(0, (), ()))
    assert isinstance(b.receive(1.0, credits=False), Arrived)
    assert [credit.channel for credit in b.credits()] == [4, 5, 4]
    with pytest.raises(DeadlineError):
        b.receive(0.0)
