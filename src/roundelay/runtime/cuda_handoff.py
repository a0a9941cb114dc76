"""Hand-over between threads of one process that compute on devices of their own or on streams of one device.

A message is handed over while its tensors may still be computed. The sender notes a place in its stream, the receiver
lets its own stream wait for it, and the host waits for nothing. The tensors' memory is kept until the receiver's stream
has used it; where the receiver's device is another one, they are copied, from device to device.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import final

import torch

from roundelay.runtime.device import AcceleratorDevice, Device
from roundelay.transport.cuda import Cuda, Event, Stream
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Message, Value

Notes = defaultdict[tuple[int, int, int], deque[Event | None]]
"""By (sender, receiver, channel), places that go with the messages under way; their order is the messages'."""


def streamed(endpoints: Sequence[Endpoint], devices: Sequence[Device], driver: Cuda) -> list[Endpoint]:
    """Endpoints that hand over between streams; the very same endpoints where every worker is on the CPU."""
    if not any(isinstance(device, AcceleratorDevice) for device in devices):
        return list(endpoints)
    notes: Notes = defaultdict(deque)  # a sender's note is there before its message is
    return [StreamEndpoint(e, d, driver, notes) for e, d in zip(endpoints, devices, strict=True)]


@final
class StreamEndpoint(Endpoint):
    """``inner``, with tensors on devices.

    Args:
        inner: hands over the objects themselves.
        device: where this worker computes.
        driver: how accelerators are asked.
        notes: of all workers of the process.
    """

    def __init__(self, inner: Endpoint, device: Device, driver: Cuda, notes: Notes) -> None:
        self.worker = inner.worker
        self._inner, self._device, self._driver, self._notes = inner, device, driver, notes
        self._own: Stream | None = device.stream if isinstance(device, AcceleratorDevice) else None
        self._sources: dict[torch.device, Stream] = {}

    def send(self, to: int, message: Message) -> int:
        """As `inner` does, with a place in this worker's stream."""
        note = None
        if self._own is not None:
            note = self._driver.event()
            note.record(self._own)
        self._notes[self.worker, to, message.channel].append(note)
        return self._inner.send(to, message)

    def grant(self, to: int, channel: int) -> None:
        """As `inner` does: a slot is room for a message, not for what a stream still does with it."""
        self._inner.grant(to, channel)

    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """As `inner` does; tensors are there for what this worker's stream is given from now on."""
        delivery = self._inner.receive(timeout_s, credits)
        if not isinstance(delivery, Arrived):
            return delivery
        message = delivery.message
        note = self._notes[delivery.source, self.worker, message.channel].popleft()
        if note is not None:
            self._wait(note)
        values = tuple(self._here(value, note) for value in message.values)
        return Arrived(delivery.source, Message(message.channel, message.header, values))

    def credits(self) -> Sequence[int]:
        """As `inner` does."""
        return self._inner.credits()

    def _wait(self, note: Event) -> None:
        if self._own is None:
            note.synchronize()  # the CPU has no stream that could wait
        else:
            self._own.wait_event(note)

    def _here(self, value: Value, note: Event | None) -> Value:
        if not isinstance(value, torch.Tensor):
            return value
        if self._own is not None and value.device == self._device.place:
            self._driver.keep(value, self._own)
            return value
        if value.device.type == "cpu" or self._own is None or note is None:
            return value.to(self._device.place)
        return self._copied(value, note)

    def _copied(self, tensor: torch.Tensor, note: Event) -> torch.Tensor:
        """A copy from another device; torch makes it on that device's current stream, and has ours wait for it."""
        source = self._sources.get(tensor.device)
        if source is None:
            source = self._sources[tensor.device] = self._driver.stream(tensor.device)
        source.wait_event(note)
        with self._driver.using(source):
            copy = tensor.to(self._device.place, non_blocking=True)
        self._driver.keep(tensor, source)
        return copy

    def close(self) -> None:
        """As `inner` does."""
        self._inner.close()

    def abort(self, reason: str) -> None:
        """As `inner` does."""
        self._inner.abort(reason)

    @property
    def aborted(self) -> bool:
        """As `inner` is."""
        return self._inner.aborted

    @property
    def bytes_sent(self) -> dict[int, int]:
        """As `inner` counts."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> dict[int, int]:
        """As `inner` counts."""
        return self._inner.bytes_received
