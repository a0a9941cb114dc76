"""Workers as threads of one process: a message is handed over, not copied.

The receiver gets the very tensor objects that the sender gave, which is why a sender may not write them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from roundelay.transport.endpoint import Arrived, CheckedEndpoint, Delivery, Granted, Lost, Message, nothing_came

Wake = Callable[[int, bool], None]
"""Told that something has come for a worker, and whether it is a credit."""


def memory_endpoints(num_workers: int, wake: Wake | None = None) -> list[MemoryEndpoint]:
    """One connected endpoint per worker, in the order of the workers; each may go to a thread of its own.

    Args:
        num_workers: D.
        wake: told, in the sender's thread, of whatever is sent. Then no endpoint waits: `receive` gives what is there.
    """
    endpoints = [MemoryEndpoint(worker, num_workers, wake) for worker in range(num_workers)]
    for endpoint in endpoints:
        endpoint.connect(endpoints)
    return endpoints


@final
class MemoryEndpoint(CheckedEndpoint):
    """One thread's end: sending is putting into the receiver's inbox. It carries objects, wherever their memory is."""

    carries = ("cpu", "cuda")

    def __init__(self, worker: int, num_workers: int, wake: Wake | None = None) -> None:
        super().__init__(worker, num_workers)
        self._endpoints: list[MemoryEndpoint] = []
        self._wake = wake

    def connect(self, endpoints: list[MemoryEndpoint]) -> None:
        """Name all endpoints of the process, this one included, by worker; once, before anything is sent."""
        self._endpoints = endpoints

    def news(self, credits: bool) -> bool:
        """Whether `receive` would give something at once."""
        return not self._inbox.empty() or (credits and bool(self._credits))

    def _take(self, timeout_s: float, credits: bool) -> Delivery:
        if self._wake is None:
            return super()._take(timeout_s, credits)
        if credits and self._credits:
            return self._credits.popleft()
        if self._inbox.empty():
            raise nothing_came(self.worker, timeout_s)
        delivery = self._inbox.get()
        if type(delivery) is Lost:
            self._forget(delivery.source)
        assert delivery is not None  # a call to look at credits comes only to an endpoint that waits
        return delivery

    def _hand(self, to: int, delivery: Delivery) -> None:
        self._endpoints[to].deliver(delivery)
        if self._wake is not None:
            self._wake(to, type(delivery) is Granted)

    def _send(self, to: int, message: Message) -> None:
        self._hand(to, Arrived(self.worker, message))

    def _grant(self, to: int, channel: int) -> None:
        self._hand(to, Granted(self.worker, channel))

    def _close(self) -> None:
        """Nothing to flush: what was sent is already in the receivers' inboxes."""

    def _abort(self, reason: str) -> None:
        for other in self._others:
            self._hand(other, Lost(self.worker, reason))
