"""Hand-over between streams: the receiver's stream is behind the sender's, and the memory is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundelay.launching.cuda_handoff import wrap_for_streams
from roundelay.runtime.device import HOST, AcceleratorDevice, Device
from roundelay.transport.endpoint import Arrived, Endpoint, Message
from roundelay.transport.memory import memory_endpoints
from tests.runtime.accelerator import Fake

ONE, OTHER = torch.device("meta"), torch.device("cuda", 1)


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on a device which is not here, and notes where it is copied, and on which stream."""

    copies: Any = ()

    @property
    def device(self) -> torch.device:
        return OTHER

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.copies.append((args, kwargs))
        return torch.empty(self.shape, device=args[0])


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.transport.memory.MemoryEndpoint.carries", ("cpu", "meta", "cuda"))


def pair(*devices: Device, driver: Fake) -> list[Endpoint]:
    return wrap_for_streams(memory_endpoints(len(devices)), devices, driver)


def arrived(endpoint: Endpoint) -> Message:
    delivery = endpoint.receive(1.0)
    assert isinstance(delivery, Arrived)
    return delivery.message


def test_the_receivers_stream_comes_behind_what_the_sender_had_given_to_its_own() -> None:
    driver = Fake()
    a, b = AcceleratorDevice(ONE, driver), AcceleratorDevice(ONE, driver)
    left, right = pair(a, b, driver=driver)
    one, two = torch.empty(3, device=ONE), torch.empty(4, device=ONE)
    own: Any = b.stream
    left.send(1, Message(0, (1,), (one, 5, None)))
    first = dict(a.stream.clock)  # type: ignore[attr-defined]
    left.send(1, Message(0, (2,), (two,)))
    second = dict(a.stream.clock)  # type: ignore[attr-defined]
    assert not own.behind(first)
    message = arrived(right)
    assert message.values[0] is one
    assert message.values[1:] == (5, None)
    assert own.behind(first)
    assert not own.behind(second)
    arrived(right)
    assert own.behind(second)
    assert [number for _, number in driver.kept] == [own.number] * 2


def test_a_message_to_another_device_is_copied_behind_the_senders_work(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Fake()
    a, b = AcceleratorDevice(OTHER, driver), AcceleratorDevice(ONE, driver)
    left, right = pair(a, b, driver=driver)
    sent = torch.ones(3).as_subclass(Elsewhere)
    places: list[Any] = []
    monkeypatch.setattr(Elsewhere, "copies", places)
    keep = driver.using
    monkeypatch.setattr(driver, "using", lambda stream: places.append(stream) or keep(stream))
    left.send(1, Message(7, (), (sent,)))
    clock = dict(a.stream.clock)  # type: ignore[attr-defined]
    value = arrived(right).values[0]
    assert isinstance(value, torch.Tensor)
    assert value.device == ONE
    copying = driver.streams[-1]  # torch copies on the source's current stream
    assert copying.device == OTHER
    assert copying.behind(clock)
    assert places == [copying, ((ONE,), {"non_blocking": True})]
    assert [number for _, number in driver.kept] == [copying.number]
    assert b.stream.behind(clock)  # type: ignore[attr-defined]


def test_the_host_waits_only_where_the_receiver_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Fake()
    left, right = pair(AcceleratorDevice(torch.device("cpu"), driver), HOST, driver=driver)
    notes = []
    make = driver.event
    monkeypatch.setattr(driver, "event", lambda timing=False: notes.append(make()) or notes[-1])
    left.send(1, Message(0, (), (torch.ones(2),)))
    arrived(right)
    assert [note.waited for note in notes] == [1]
    right.send(0, Message(1, (), (torch.ones(2),)))
    arrived(left)
    assert len(notes) == 1  # the CPU has nothing under way when it sends


def test_grants_ends_and_counts_are_those_of_the_endpoint_inside() -> None:
    driver = Fake()
    left, right = pair(AcceleratorDevice(ONE, driver), HOST, driver=driver)
    right.grant(0, 3)
    assert left.receive(1.0).source == 1
    right.send(0, Message(0, (), (torch.ones(2),)))
    assert right.bytes_sent == {0: 8}
    arrived(left)
    assert left.bytes_received == {0: 8}
    left.abort("enough")
    assert right.receive(1.0).source == 0
    right.close()
