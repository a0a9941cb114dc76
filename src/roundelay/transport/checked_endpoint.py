"""The part of an endpoint that transports share: argument checks, byte counters, the inbox, and how it ends."""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeVar, final

from roundelay.errors import InternalError, WorkerLostError
from roundelay.transport.endpoint import (
    Arrived,
    Delivery,
    Endpoint,
    Granted,
    Lost,
    Message,
    check_channel,
    check_message,
    nothing_came,
)

_Item = TypeVar("_Item")


def next_item(source: queue.SimpleQueue[_Item], timeout_s: float) -> _Item:
    """Return the next item of a queue from which no other thread takes.

    `SimpleQueue.get(timeout=...)` of CPython 3.11 may wait forever: after a first, non-blocking attempt at its lock it
    computes the time left without checking whether that has become negative, which the lock takes as "no timeout". A
    `get_nowait` before it leaves the lock held, and that path is not taken.

    Raises:
        queue.Empty: none came within `timeout_s` seconds.
    """
    try:
        return source.get_nowait()
    except queue.Empty:
        return source.get(timeout=max(0.0, timeout_s))


class CheckedEndpoint(Endpoint):
    """What transports share: argument checks, byte counters, the inbox, and the order of `close` and `abort`.

    A subclass implements ``_send``, ``_grant``, ``_close`` and ``_abort``, and passes what arrives to ``deliver``.
    """

    #: device types whose tensors it takes
    carries: tuple[str, ...] = ("cpu",)

    def __init__(self, worker: int, others: Iterable[int]) -> None:
        self.worker = worker
        self._others = tuple(other for other in others if other != worker)
        self._inbox: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()  # None: a credit has come
        self._credits: deque[Granted] = deque()
        self._wants_credit = False
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._end_lock = threading.Lock()
        self._ended: str | None = None
        self._aborted = False

    @abstractmethod
    def _send(self, to: int, message: Message) -> None: ...

    @abstractmethod
    def _grant(self, to: int, channel: int) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _abort(self, reason: str) -> None: ...

    @final
    def send(self, to: int, message: Message) -> int:
        """Check, count and send `message`."""
        payload_bytes = check_message(message, self.carries)
        if self._ended is not None or to not in self._others:
            self._refuse(to)
        self._sent[message.channel] += payload_bytes
        self._send(to, message)
        return payload_bytes

    @final
    def grant(self, to: int, channel: int) -> None:
        """Check the arguments and return one credit."""
        check_channel(channel)
        if self._ended is not None or to not in self._others:
            self._refuse(to)
        self._grant(to, channel)

    @final
    def deliver(self, delivery: Delivery) -> None:
        """Put what has arrived into the inbox, from any thread; a credit wakes the worker only if it waits for one."""
        if not isinstance(delivery, Granted):
            self._inbox.put(delivery)
            return
        self._credits.append(delivery)  # before reading the flag: the worker sets the flag, then looks for credits
        if self._wants_credit:
            self._inbox.put(None)

    def _take(self, timeout_s: float, credits: bool) -> Delivery:
        left_s, deadline = timeout_s, time.monotonic() + timeout_s
        while True:
            self._wants_credit = credits
            if credits and self._credits:
                self._wants_credit = False
                return self._credits.popleft()
            try:
                delivery = next_item(self._inbox, left_s)
            except queue.Empty:
                raise nothing_came(self.worker, timeout_s) from None
            self._wants_credit = False
            if delivery is not None:
                return self._taken(delivery)
            left_s = deadline - time.monotonic()

    def _take_arrived(self, credits: bool) -> Delivery | None:
        """Take what has arrived, without waiting; None if there is nothing. For endpoints that override `_take`."""
        while not self._inbox.empty():
            delivery = self._inbox.get()
            if delivery is not None:
                return self._taken(delivery)
        return self._credits.popleft() if credits and self._credits else None

    def _taken(self, delivery: Delivery) -> Delivery:
        """Return `delivery`; if it is a loss, drop the credits of the lost worker."""
        if type(delivery) is Lost:
            for _ in range(len(self._credits)):
                credit = self._credits.popleft()
                if credit.source != delivery.source:
                    self._credits.append(credit)
        return delivery

    @final
    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """Return the next delivery and count its bytes."""
        delivery = self._take(timeout_s, credits)
        if type(delivery) is Arrived:
            message = delivery.message
            self._received[message.channel] += message.payload_bytes
        return delivery

    def count_shared(self, channel: int, sent: int, received: int) -> None:
        """Count bytes that went through shared memory."""
        for counted, num_bytes in ((self._sent, sent), (self._received, received)):
            if num_bytes:  # else the channel is not in it
                counted[channel] += num_bytes

    def credits(self) -> Sequence[Granted]:
        """Take all credits that have arrived."""
        arrived = self._credits
        return [arrived.popleft() for _ in range(len(arrived))]

    @final
    def close(self) -> None:
        """Close normally, unless closed or aborted before."""
        if self._end("it was closed", aborted=False):
            self._close()

    @final
    def abort(self, reason: str) -> None:
        """Close immediately, unless closed or aborted before."""
        if self._end(reason, aborted=True):
            self._inbox.put(Lost(self.worker, reason))  # ends a `receive` now, not after the others are notified
            self._abort(reason)

    @property
    @final
    def aborted(self) -> bool:
        """Whether `abort`, and not `close`, has ended it."""
        return self._aborted

    @property
    @final
    def bytes_sent(self) -> dict[int, int]:
        """A copy of the counters."""
        return dict(self._sent)

    @property
    @final
    def bytes_received(self) -> dict[int, int]:
        """A copy of the counters."""
        return dict(self._received)

    def _end(self, reason: str, *, aborted: bool) -> bool:
        """Mark the endpoint as ended; return whether this call was the first. Safe from any thread."""
        with self._end_lock:
            first = self._ended is None
            if first:
                self._ended, self._aborted = reason, aborted
        return first

    def _refuse(self, to: int) -> NoReturn:
        """Raise the error that says why nothing can be sent to worker `to`."""
        if to not in self._others:
            raise InternalError(
                f"worker {self.worker} sending",
                got=f"receiver {to}",
                expected=f"one of {list(self._others)}",
                remedy="Report this as a bug: lowering must name another worker of the plan.",
            )
        if self._aborted:
            raise WorkerLostError(
                f"worker {self.worker} sending to worker {to}",
                got=f"an aborted endpoint ({self._ended})",
                expected="an open one",
                remedy="Look at the first error of the run; this one follows from it.",
            )
        raise InternalError(
            f"worker {self.worker} sending to worker {to}",
            got="a closed endpoint",
            expected="an open one",
            remedy="Report this as a bug: a worker closes only when its program has ended.",
        )
