"""Hands tensors over between threads of one process that compute on different devices, or streams of one device.

A message is handed over while its tensors may still be computed: the sender records an event in its stream, the
receiver's stream waits for it, and the host does not wait. The tensors' memory is kept until the receiver's stream has
used it. If the receiver's device is another one, they are copied from device to device.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import final

import torch

from roundelay.runtime.device import AcceleratorDevice, Device
from roundelay.transport.cuda import Cuda, Event, Stream
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Granted, Message, Value

Events = defaultdict[tuple[int, int, int], deque[Event | None]]
"""(sender, receiver, channel) to the events of the messages on the way, in the messages' order."""


def wrap_for_streams(endpoints: Sequence[Endpoint], devices: Sequence[Device], driver: Cuda) -> list[Endpoint]:
    """Endpoints that hand tensors over between streams; the same endpoints if every worker is on the CPU."""
    if not any(isinstance(device, AcceleratorDevice) for device in devices):
        return list(endpoints)
    events: Events = defaultdict(deque)  # the sender appends an event before it sends the message
    return [StreamEndpoint(e, d, driver, events) for e, d in zip(endpoints, devices, strict=True)]


@final
class StreamEndpoint(Endpoint):
    """An endpoint that hands over tensors on devices.

    Args:
        inner: hands over the objects without a copy.
        device: of this worker.
        driver: the interface to CUDA.
        events: of all workers of the process.
    """

    def __init__(self, inner: Endpoint, device: Device, driver: Cuda, events: Events) -> None:
        self.worker = inner.worker
        self._inner, self._device, self._driver, self._events = inner, device, driver, events
        self._own: Stream | None = device.stream if isinstance(device, AcceleratorDevice) else None
        self._sources: dict[torch.device, Stream] = {}

    def send(self, to: int, message: Message) -> int:
        """Send as `inner` does, and record an event in this worker's stream."""
        event = None
        if self._own is not None:
            event = self._driver.event()
            event.record(self._own)
        self._events[self.worker, to, message.channel].append(event)
        return self._inner.send(to, message)

    def grant(self, to: int, channel: int) -> None:
        """Grant as `inner` does: a slot holds a message, not what a stream still computes with it."""
        self._inner.grant(to, channel)

    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """Receive as `inner` does; this worker's stream may use the tensors from now on."""
        delivery = self._inner.receive(timeout_s, credits)
        if not isinstance(delivery, Arrived):
            return delivery
        message = delivery.message
        event = self._events[delivery.source, self.worker, message.channel].popleft()
        if event is not None:
            self._wait(event)
        values = tuple(self._on_own_device(value, event) for value in message.values)
        return Arrived(delivery.source, Message(message.channel, message.header, values))

    def credits(self) -> Sequence[Granted]:
        """The credits of `inner`."""
        return self._inner.credits()

    def _wait(self, event: Event) -> None:
        if self._own is None:
            event.synchronize()  # the CPU has no stream that could wait
        else:
            self._own.wait_event(event)

    def _on_own_device(self, value: Value, event: Event | None) -> Value:
        if not isinstance(value, torch.Tensor):
            return value
        if self._own is not None and value.device == self._device.torch_device:
            self._driver.keep(value, self._own)
            return value
        if value.device.type == "cpu" or self._own is None or event is None:
            return value.to(self._device.torch_device)
        return self._copy(value, event)

    def _copy(self, tensor: torch.Tensor, event: Event) -> torch.Tensor:
        """A copy from another device; torch copies on that device's current stream, and lets ours wait for it."""
        source = self._sources.get(tensor.device)
        if source is None:
            source = self._sources[tensor.device] = self._driver.stream(
                tensor.device, f"messages to worker {self.worker}"
            )
        source.wait_event(event)
        with self._driver.using(source):
            copy = tensor.to(self._device.torch_device, non_blocking=True)
        self._driver.keep(tensor, source)
        return copy

    def close(self) -> None:
        """Close `inner`."""
        self._inner.close()

    def abort(self, reason: str) -> None:
        """Abort `inner`."""
        self._inner.abort(reason)

    @property
    def aborted(self) -> bool:
        """Whether `inner` was aborted."""
        return self._inner.aborted

    @property
    def bytes_sent(self) -> dict[int, int]:
        """Bytes that `inner` has sent."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> dict[int, int]:
        """Bytes that `inner` has received."""
        return self._inner.bytes_received
