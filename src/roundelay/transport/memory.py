"""The `memory` transport: workers are threads of one process, and messages are passed without a copy.

The receiver gets the sender's own tensor objects; this is why a sender must not write them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from roundelay.transport.checked_endpoint import CheckedEndpoint
from roundelay.transport.endpoint import Arrived, Delivery, Granted, Lost, Message, nothing_came

Wake = Callable[[int, bool], None]
"""Called with the worker for which something has arrived, and whether that is a credit."""


def memory_endpoints(num_workers: int, wake: Wake | None = None) -> list[MemoryEndpoint]:
    """Return one connected endpoint per worker, in order; each may be used by a thread of its own.

    Args:
        num_workers: how many workers there are.
        wake: called in the sender's thread for everything that is sent. With it, `receive` never waits.
    """
    endpoints = [MemoryEndpoint(worker, num_workers, wake) for worker in range(num_workers)]
    for endpoint in endpoints:
        endpoint.connect(endpoints)
    return endpoints


@final
class MemoryEndpoint(CheckedEndpoint):
    """One thread's endpoint: sending puts the message into the receiver's inbox."""

    carries = ("cpu", "cuda")

    def __init__(self, worker: int, num_workers: int, wake: Wake | None = None) -> None:
        super().__init__(worker, range(num_workers))
        self._endpoints: list[MemoryEndpoint] = []
        self._wake = wake

    def connect(self, endpoints: list[MemoryEndpoint]) -> None:
        """Set the endpoints of all workers, this one included; called once, before anything is sent."""
        self._endpoints = endpoints

    def has_delivery(self, credits: bool) -> bool:
        """Whether `receive` would return something at once."""
        return not self._inbox.empty() or (credits and bool(self._credits))

    def _take(self, timeout_s: float, credits: bool) -> Delivery:
        if self._wake is None:
            return super()._take(timeout_s, credits)
        delivery = self._take_arrived(credits)
        if delivery is None:
            raise nothing_came(self.worker, timeout_s)
        return delivery

    def _deliver_to(self, to: int, delivery: Delivery) -> None:
        self._endpoints[to].deliver(delivery)
        if self._wake is not None:
            self._wake(to, type(delivery) is Granted)

    def _send(self, to: int, message: Message) -> None:
        self._deliver_to(to, Arrived(self.worker, message))

    def _grant(self, to: int, channel: int) -> None:
        self._deliver_to(to, Granted(self.worker, channel))

    def _close(self) -> None:
        """Nothing to flush: what was sent is already in the receivers' inboxes."""

    def _abort(self, reason: str) -> None:
        for other in self._others:
            self._deliver_to(other, Lost(self.worker, reason))
