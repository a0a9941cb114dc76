"""What every transport promises, so that the worker above it never asks which one it runs on.

A transport carries messages and credits between workers and says when a worker is gone. It does not decide when a
message may be sent: credits are counted by the actor machine, above. The promises, tested for every transport by
``tests/contracts/test_transport.py``:

- between one pair of workers on one channel the order is kept, and nothing is lost or doubled;
- integers, floats and tensors arrive exactly: same value, dtype and shape;
- `Endpoint.send` and `Endpoint.grant` never wait for the receiver;
- a worker that dies or aborts becomes exactly one `Lost` at every other worker, after which nothing comes from it;
  a worker that closes in good order becomes nothing at all;
- what is sent to a worker that is lost or has closed is dropped.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, TypeVar, final

import torch

from roundelay.errors import DeadlineError, InternalError, RoundelayError, WorkerLostError
from roundelay.transport.queues import next_item

_T = TypeVar("_T")

Value = torch.Tensor | int | float | None
"""What a message carries. A tensor is dense, contiguous, outside every autograd graph, and on a device of a kind that
the transport carries: the CPU, if it says no other."""

MAX_HEADER = 16
MAX_VALUES = 65_536
MAX_DIMENSIONS = 16
MAX_MESSAGE_BYTES = 2**34
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Every dtype a message may carry; a dtype's place in this tuple is its number on the wire."""

DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


@final
class Message(NamedTuple):
    """What one worker sends to another.

    Args:
        channel: the plan's small non-negative number of the edge that the message travels on.
        header: up to 16 int64 that the sender and the receiver give a meaning.
        values: tensors, plain ints (int64), plain floats and None, in an order that both sides know.
    """

    channel: int
    header: tuple[int, ...]
    values: tuple[Value, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors; header, ints and floats are not counted, as no cost model prices them."""
        total = 0
        for value in self.values:
            if isinstance(value, torch.Tensor):
                total += value.nbytes
        return total


@final
class Arrived(NamedTuple):
    """`message` has come from worker `source`."""

    source: int
    message: Message


@final
class Granted(NamedTuple):
    """Worker `source`, the consumer of `channel`, has freed one slot of it: one credit."""

    source: int
    channel: int


@final
class Lost(NamedTuple):
    """Worker `source` is gone for good; nothing follows from it."""

    source: int
    reason: str


Delivery = Arrived | Granted | Lost


class Endpoint(ABC):
    """One worker's end of the transport.

    `send` and `grant` belong to one thread, `receive` to one, which may be another; `abort` to any.
    """

    worker: int
    """This worker's number, 0 to num_workers - 1."""

    @abstractmethod
    def send(self, to: int, message: Message) -> int:
        """Hand `message` over and return at once; nobody may write its tensors afterwards.

        Returns:
            Its `Message.payload_bytes`.

        Raises:
            InternalError: the message breaks the contract, `to` is no other worker, or this endpoint is closed.
            WorkerLostError: this endpoint was aborted.
        """

    @abstractmethod
    def grant(self, to: int, channel: int) -> None:
        """Return one credit of `channel` to its producer `to`, at once. Raises as `send` does."""

    @abstractmethod
    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """The next delivery, in the order of arrival; a credit may overtake a message, or be late.

        An `abort` in another thread ends the wait: then it is ``Lost`` of this worker itself.

        Args:
            timeout_s: seconds to wait; 0: what is there.
            credits: whether a credit is wanted. Without it, one may stay for a later call: to take it, and to be woken
                for it, would cost more than all else about a credit.

        Raises:
            DeadlineError: nothing came within `timeout_s` seconds.
        """

    def credits(self) -> Sequence[int]:
        """Channels of the credits that are here, which are then taken; `receive` gives those that this leaves, if any.

        Whoever takes them with every message need rarely wait for one.
        """
        return ()

    @abstractmethod
    def close(self) -> None:
        """Flush what was sent and leave in good order; a second call, or one after `abort`, does nothing.

        Raises:
            DeadlineError: a living worker did not take what was sent in time. The endpoint is closed all the same.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Leave now: every other worker gets ``Lost(self.worker, reason)``, as far as it can still be told."""

    @property
    @abstractmethod
    def aborted(self) -> bool:
        """Whether `abort` has ended it; nothing that its worker could still do is asked for then."""

    def cause(self, error: RoundelayError) -> RoundelayError:
        """What an error that this worker met comes from: itself, unless the transport knows better."""
        return error

    @property
    @abstractmethod
    def bytes_sent(self) -> dict[int, int]:
        """`Message.payload_bytes` sent so far, per channel."""

    @property
    @abstractmethod
    def bytes_received(self) -> dict[int, int]:
        """`Message.payload_bytes` that `receive` has returned so far, per channel."""


class CheckedEndpoint(Endpoint):
    """What every real transport shares: checks, byte counters, the inbox and the end of life.

    A transport implements ``_send``, ``_grant``, ``_close``, ``_abort``, and gives what comes in to ``deliver``, or has
    a ``_take`` of its own.
    """

    #: kinds of devices whose tensors it takes; the CPU's every one does
    carries: tuple[str, ...] = ("cpu",)

    def __init__(self, worker: int, num_workers: int) -> None:
        self.worker = worker
        self._others = tuple(other for other in range(num_workers) if other != worker)
        self._inbox: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()  # None: look at the credits
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
        """Check, count and hand over `message`."""
        payload_bytes = check_message(message, self.carries)
        if self._ended is not None or to not in self._others:
            self._refuse(to)
        self._sent[message.channel] += payload_bytes
        self._send(to, message)
        return payload_bytes

    @final
    def grant(self, to: int, channel: int) -> None:
        """Check and return one credit."""
        check_channel(channel)
        if self._ended is not None or to not in self._others:
            self._refuse(to)
        self._grant(to, channel)

    @final
    def deliver(self, delivery: Delivery) -> None:
        """Take what has come in, on any thread; a credit wakes the worker only if it waits for one."""
        if not isinstance(delivery, Granted):
            self._inbox.put(delivery)
            return
        self._credits.append(delivery)  # first: the worker says that it wants one, then looks whether one is there
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
            if type(delivery) is Lost:
                self._forget(delivery.source)
            if delivery is not None:
                return delivery
            left_s = deadline - time.monotonic()

    def _forget(self, worker: int) -> None:
        """Drop the credits of a worker that is lost: nothing follows from it."""
        for _ in range(len(self._credits)):
            credit = self._credits.popleft()
            if credit.source != worker:
                self._credits.append(credit)

    @final
    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """The next delivery, counted."""
        delivery = self._take(timeout_s, credits)
        if type(delivery) is Arrived:
            message = delivery.message
            self._received[message.channel] += message.payload_bytes
        return delivery

    def credits(self) -> Sequence[int]:
        """All that have been delivered."""
        come = self._credits
        return [come.popleft().channel for _ in range(len(come))]

    @final
    def close(self) -> None:
        """End in good order, if nothing has ended it before."""
        if self._end("it was closed", aborted=False):
            self._close()

    @final
    def abort(self, reason: str) -> None:
        """End now, if nothing has ended it before."""
        if self._end(reason, aborted=True):
            self._inbox.put(Lost(self.worker, reason))  # whoever waits need not until the others have been told
            self._abort(reason)

    @property
    @final
    def aborted(self) -> bool:
        """Whether `abort` was the first to end it."""
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
        """Whether this call is the first that ends the endpoint; `abort` may come from another thread."""
        with self._end_lock:
            first = self._ended is None
            if first:
                self._ended, self._aborted = reason, aborted
        return first

    def _refuse(self, to: int) -> NoReturn:
        """Say why nothing can be sent to worker `to`."""
        if to not in self._others:
            raise InternalError(
                f"worker {self.worker} sending",
                got=f"receiver {to}",
                expected=f"one of {list(self._others)}",
                remedy="Report this program: lowering must name another worker of the plan.",
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
            remedy="Report this: a worker closes only when its program has ended.",
        )


def nothing_came(worker: int, timeout_s: float) -> DeadlineError:
    """What `Endpoint.receive` raises when its time is over."""
    return DeadlineError(
        f"worker {worker} waiting for a message or a credit",
        got=f"nothing for {timeout_s:g} s",
        expected="a delivery",
        remedy="Look at what the other workers wait for, or allow more time.",
    )


def check_channel(channel: int) -> None:
    """Raise InternalError unless `channel` is a small non-negative int."""
    if not (type(channel) is int and 0 <= channel < 2**31):
        raise _bad("channel", repr(channel), "an int from 0 to 2**31 - 1")


def check_message(message: Message, carries: tuple[str, ...]) -> int:
    """The message's payload bytes; raise InternalError unless it keeps the contract. About a microsecond per value."""
    channel, header, values = message
    check_channel(channel)
    if len(header) > MAX_HEADER:
        raise _bad("header", f"{len(header)} numbers", f"at most {MAX_HEADER}")
    if len(values) > MAX_VALUES:
        raise _bad("values", f"{len(values)} of them", f"at most {MAX_VALUES}")
    if header:
        _check_ints(header)
    payload_bytes = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            if (
                value.layout is not torch.strided
                or value.requires_grad
                or not value.is_contiguous()
                or value.is_conj()
                or value.is_neg()
                or not (value.is_cpu or value.device.type in carries)
                or value.dtype not in DTYPE_NUMBERS
                or value.dim() > MAX_DIMENSIONS
            ):
                raise _bad("tensor", _tensor_fault(value), f"dense, contiguous, detached, on {' or '.join(carries)}")
            payload_bytes += value.nbytes
        elif type(value) is int:
            _check_ints((value,))
        elif value is not None and type(value) is not float:
            raise _bad("value", f"a {type(value).__name__}", "a tensor, an int, a float or None")
    if payload_bytes > MAX_MESSAGE_BYTES:
        raise _bad("tensors", f"{payload_bytes} bytes", f"at most {MAX_MESSAGE_BYTES}")
    return payload_bytes


def _check_ints(numbers: tuple[int, ...]) -> None:
    if {*map(type, numbers)} != {int} or min(numbers) < INT64_MIN or max(numbers) > INT64_MAX:
        raise _bad("integer", f"one of {numbers!r}", "a plain int of 64 bits")


def _tensor_fault(tensor: torch.Tensor) -> str:
    """What a tensor that was refused is like."""
    return (
        f"one on {tensor.device}, layout {tensor.layout}, dtype {tensor.dtype}, shape {tuple(tensor.shape)}"
        + (f", strides {tensor.stride()}" if tensor.layout is torch.strided else "")
        + (", which requires a gradient" if tensor.requires_grad else "")
        + (", a lazy conjugate or negative" if tensor.is_conj() or tensor.is_neg() else "")
    )


def _bad(subject: str, got: str, expected: str) -> InternalError:
    return InternalError(
        f"{subject} of a message", got=got, expected=expected, remedy="Report this: the sender must prepare it."
    )
