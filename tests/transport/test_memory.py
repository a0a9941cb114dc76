"""The thread transport hands over; it does not copy."""

from __future__ import annotations

import torch

from roundelay.transport.contract import Arrived, Message
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
