"""Workers as threads of one process: a message is handed over, not copied.

The receiver gets the very tensor objects that the sender gave, which is why a sender may not write them afterwards.
"""

from __future__ import annotations

from typing import final

from roundelay.transport.contract import Arrived, CheckedEndpoint, Endpoint, Granted, Lost, Message


def memory_endpoints(num_workers: int) -> list[Endpoint]:
    """One connected endpoint per worker, in the order of the workers; each may go to a thread of its own."""
    endpoints = [MemoryEndpoint(worker, num_workers) for worker in range(num_workers)]
    for endpoint in endpoints:
        endpoint.connect(endpoints)
    return list(endpoints)


@final
class MemoryEndpoint(CheckedEndpoint):
    """One thread's end: sending is putting into the receiver's inbox. It carries objects, wherever their memory is."""

    carries = ("cpu", "cuda")

    def __init__(self, worker: int, num_workers: int) -> None:
        super().__init__(worker, num_workers)
        self._endpoints: list[MemoryEndpoint] = []

    def connect(self, endpoints: list[MemoryEndpoint]) -> None:
        """Name all endpoints of the process, this one included, by worker; once, before anything is sent."""
        self._endpoints = endpoints

    def _send(self, to: int, message: Message) -> None:
        self._endpoints[to].deliver(Arrived(self.worker, message))

    def _grant(self, to: int, channel: int) -> None:
        self._endpoints[to].deliver(Granted(self.worker, channel))

    def _close(self) -> None:
        """Nothing to flush: what was sent is already in the receivers' inboxes."""

    def _abort(self, reason: str) -> None:
        for other in self._others:
            self._endpoints[other].deliver(Lost(self.worker, reason))
