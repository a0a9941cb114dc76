"""The interface of every transport: messages, deliveries and the `Endpoint` of one worker.

A transport carries messages and credits between workers and reports when a worker is lost. It does not decide when a
message may be sent: the actor machine counts the credits. Every transport guarantees the following, tested by
``tests/contracts/test_transport.py``:

- per pair of workers and channel, messages arrive in order, none lost and none duplicated;
- integers, floats and tensors arrive exactly: same value, dtype and shape;
- `Endpoint.send` and `Endpoint.grant` never wait for the receiver;
- a worker that dies or aborts yields exactly one `Lost` at every other worker, and nothing from it afterwards;
  a worker that closes normally yields none;
- what is sent to a worker that is lost or has closed is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch

from roundelay.errors import DeadlineError, InternalError, RoundelayError

Value = torch.Tensor | int | float | None
"""What a message carries. A tensor is dense, contiguous, detached, and on a device type that the transport carries."""

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
"""Every dtype that a message may carry; its index in this tuple is its number on the wire."""

DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


@final
class Message(NamedTuple):
    """What one worker sends to another.

    Args:
        channel: the non-negative number of the plan's channel.
        header: up to 16 int64 whose meaning sender and receiver agree on.
        values: tensors, plain ints (int64), plain floats and None, in an order that both sides know.
    """

    channel: int
    header: tuple[int, ...]
    values: tuple[Value, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors. Header, ints and floats are not counted: the cost model ignores them too."""
        total = 0
        for value in self.values:
            if isinstance(value, torch.Tensor):
                total += value.nbytes
        return total


@final
class Arrived(NamedTuple):
    """A message from worker `source`."""

    source: int
    message: Message


@final
class Granted(NamedTuple):
    """One credit: worker `source`, the consumer of `channel`, has freed one of its slots."""

    source: int
    channel: int


@final
class Lost(NamedTuple):
    """Worker `source` has died or aborted, or sent bytes that are no message; nothing follows from it."""

    source: int
    reason: str
    unfit: bool = False
    """Whether it sent such bytes."""


Delivery = Arrived | Granted | Lost


class Endpoint(ABC):
    """One worker's end of the transport.

    `send` and `grant` are called by one thread, `receive` by one, possibly another; `abort` by any.
    """

    worker: int
    """This worker's number, 0 to num_workers - 1."""

    @abstractmethod
    def send(self, to: int, message: Message) -> int:
        """Send `message` to worker `to` without waiting; its tensors must not be written afterwards.

        Returns:
            Its `Message.payload_bytes`.

        Raises:
            InternalError: the message is invalid, `to` is not another worker, or this endpoint is closed.
            WorkerLostError: this endpoint was aborted.
        """

    @abstractmethod
    def grant(self, to: int, channel: int) -> None:
        """Return one credit of `channel` to its producer, worker `to`, without waiting. Raises as `send` does."""

    @abstractmethod
    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """Wait for the next delivery and return it, in the order of arrival; credits may overtake messages.

        An `abort` in another thread ends the wait with a ``Lost`` of this worker itself.

        Args:
            timeout_s: seconds to wait; 0 to poll.
            credits: whether to return credits too. If not, they may be kept for a later call, so that a worker that
                lacks none is not woken for them.

        Raises:
            DeadlineError: nothing came within `timeout_s` seconds.
        """

    def shared(self, channel: int) -> torch.Tensor | None:
        """Memory, as bytes, that holders of a stage share; None where the transport has none.

        Args:
            channel: of an exchange; where a stage's sums are handed on instead, the stage's first of kind `partial`.
        """
        return None

    def count_shared(self, channel: int, sent: int, received: int) -> None:
        """Count bytes of `channel` that went through shared memory as sent and received."""
        raise _bad("memory", f"{sent} bytes of channel {channel}", "none, as this transport shares none")

    def credits(self) -> Sequence[Granted]:
        """Take the credits that have arrived; `receive` returns any that this leaves.

        A worker that calls this after every message rarely has to wait for a credit.
        """
        return ()

    @abstractmethod
    def close(self) -> None:
        """Flush what was sent and close normally; a second call, or one after `abort`, does nothing.

        Raises:
            DeadlineError: a living worker did not take what was sent in time. The endpoint is closed all the same.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Close immediately: every other worker that can still be reached gets ``Lost(self.worker, reason)``."""

    @property
    @abstractmethod
    def aborted(self) -> bool:
        """Whether `abort` has ended this endpoint; its worker then has nothing left to do."""

    def cause(self, error: RoundelayError) -> RoundelayError:
        """The error that caused `error` on this worker: `error` itself, unless the transport knows an earlier one."""
        return error

    @property
    @abstractmethod
    def bytes_sent(self) -> dict[int, int]:
        """`Message.payload_bytes` sent so far, per channel."""

    @property
    @abstractmethod
    def bytes_received(self) -> dict[int, int]:
        """`Message.payload_bytes` that `receive` has returned so far, per channel."""


@final
class ForkedLinks(NamedTuple):
    """What connects the workers of a run that are forked processes.

    Args:
        connect: returns a worker's endpoint; called first of all in its own process.
        forked: called in the launcher when all workers are forked.
    """

    connect: Callable[[int], Endpoint]
    forked: Callable[[], None]


def nothing_came(worker: int, timeout_s: float) -> DeadlineError:
    """The error that `Endpoint.receive` raises after `timeout_s` seconds."""
    return DeadlineError(
        f"worker {worker} waiting for a message or a credit",
        got=f"nothing for {timeout_s:g} s",
        expected="a delivery",
        remedy="Check what the other workers wait for, or allow more time.",
    )


def check_channel(channel: int) -> None:
    """Raise InternalError unless `channel` is a small non-negative int."""
    if not (type(channel) is int and 0 <= channel < 2**31):
        raise _bad("channel", repr(channel), "an int from 0 to 2**31 - 1")


def check_message(message: Message, carries: tuple[str, ...]) -> int:
    """Return the message's payload bytes; raise InternalError if it is invalid. About a microsecond per value."""
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
    """Describe a tensor that was refused."""
    return (
        f"one on {tensor.device}, layout {tensor.layout}, dtype {tensor.dtype}, shape {tuple(tensor.shape)}"
        + (f", strides {tensor.stride()}" if tensor.layout is torch.strided else "")
        + (", which requires a gradient" if tensor.requires_grad else "")
        + (", a lazy conjugate or negative" if tensor.is_conj() or tensor.is_neg() else "")
    )


def _bad(subject: str, got: str, expected: str) -> InternalError:
    return InternalError(
        f"{subject} of a message",
        got=got,
        expected=expected,
        remedy="Report this as a bug: the sender must prepare it.",
    )
