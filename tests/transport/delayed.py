"""A transport that delays deliveries at random, within what the interface allows; for tests.

Results must depend on the plan alone, never on timing. Tests run the same job over a delayed transport with several
seeds: deliveries of different channels or workers then overtake each other as they rarely would otherwise.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from typing import final

import torch

from roundelay.errors import DeadlineError
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Lost, Message, nothing_came


@final
class DelayedEndpoint(Endpoint):
    """Wraps `inner` and holds each delivery back for a random time up to `max_delay_s` seconds.

    The order of one worker's deliveries on one channel is kept, and a `Lost` comes after everything of that worker.
    """

    def __init__(self, inner: Endpoint, seed: int, max_delay_s: float) -> None:
        self.worker = inner.worker
        self._inner = inner
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._held: list[tuple[float, int, Delivery]] = []  # a heap: time due, arrival number, delivery
        self._count = 0
        self._last_due: dict[tuple[int, int], float] = {}
        self._received: Counter[int] = Counter()

    def send(self, to: int, message: Message) -> int:
        """As `inner` does."""
        return self._inner.send(to, message)

    def grant(self, to: int, channel: int) -> None:
        """As `inner` does."""
        self._inner.grant(to, channel)

    def shared(self, channel: int) -> torch.Tensor | None:
        """As `inner` does."""
        return self._inner.shared(channel)

    def count_shared(self, channel: int, sent: int, received: int) -> None:
        """As `inner` does."""
        self._inner.count_shared(channel, sent, received)

    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """Return the next delivery that is due; held-back credits are returned too.

        Raises:
            DeadlineError: nothing was due within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            due = self._held[0][0] if self._held else deadline
            self._hold(min(due, deadline) - now, credits)
            if self._held and self._held[0][0] <= time.monotonic():
                return self._release()
            if time.monotonic() >= deadline:
                raise nothing_came(self.worker, timeout_s)

    def close(self) -> None:
        """As `inner` does; what is held back is dropped."""
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
        """Bytes of what `receive` returned: less than `inner` counts while something is held back."""
        return dict(self._received)

    def _hold(self, timeout_s: float, credits: bool) -> None:
        """Wait up to `timeout_s` seconds for a delivery of `inner`, and hold it back."""
        try:
            delivery = self._inner.receive(max(0.0, timeout_s), credits)
        except DeadlineError:
            return
        due = max(time.monotonic() + self._random.uniform(0.0, self._max_delay_s), self._earliest(delivery))
        if not isinstance(delivery, Lost):
            self._last_due[delivery.source, _channel(delivery)] = due
        heapq.heappush(self._held, (due, self._count, delivery))
        self._count += 1

    def _earliest(self, delivery: Delivery) -> float:
        """The time before which `delivery` must not be released, to keep the order."""
        if isinstance(delivery, Lost):
            return max((due for (source, _), due in self._last_due.items() if source == delivery.source), default=0.0)
        return self._last_due.get((delivery.source, _channel(delivery)), 0.0)

    def _release(self) -> Delivery:
        _, _, delivery = heapq.heappop(self._held)
        if isinstance(delivery, Arrived):
            self._received[delivery.message.channel] += delivery.message.payload_bytes
        return delivery


def _channel(delivery: Delivery) -> int:
    if isinstance(delivery, Arrived):
        return delivery.message.channel
    return -1 if isinstance(delivery, Lost) else delivery.channel
