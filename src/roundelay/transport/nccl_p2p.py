"""Lanes: what carries the tensors of messages from one process to another, apart from their frames; and NCCL's.

A frame announces a message: its channel, header, numbers, and dtype and shape of each tensor on the device
(:func:`announce`). The receiver allocates these (:func:`allocate_announced`), so that what comes over a lane is never
interpreted as anything but the bytes of a tensor. There is one lane per pair of workers and direction, so that its
order is that of the frames.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from roundelay.errors import DeadlineError, InternalError
from roundelay.transport.cuda import Cuda, Stream
from roundelay.transport.endpoint import DTYPES, MAX_DIMENSIONS, MAX_MESSAGE_BYTES, Message, Value

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONG_S = 86_400.0
"""Seconds after which NCCL's own watchdog ends the process; gloo or a deadline ends every wait long before."""

Wait = Callable[[], None]
"""Makes the current stream wait for a receive; raises RuntimeError if its lane is broken."""


class Lane(ABC):
    """Carries bytes from one worker to one other, in order. Only one side sends."""

    @abstractmethod
    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """Send one-dimensional uint8 tensors without waiting; they must not be written afterwards."""

    @abstractmethod
    def post(self, parts: Sequence[torch.Tensor]) -> Wait:
        """Post receives into tensors of the same number and sizes, without waiting."""

    @abstractmethod
    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until everything sent is received, or dropped by a side that is gone; whether it is."""

    @abstractmethod
    def close(self) -> None:
        """Close normally, when everything has been received; may wait for the other side to do the same."""

    @abstractmethod
    def abort(self) -> None:
        """End all transfers and the lane; safe from any thread, and more than once."""


@final
class NcclLane(Lane):
    """One direction between two processes over NCCL: a group of two, sender first.

    Args:
        store: where the two meet; of this lane alone.
        sends: whether this side is the sender.
    """

    def __init__(self, store: Store, sends: bool) -> None:
        kind: Any = dist.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=LONG_S)
        self._group = kind(store, 0 if sends else 1, 2, options)
        self._held: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        """As `Lane` says; also releases tensors whose sends are complete."""
        self._release_sent()
        for part in parts:
            self._held.append((self._group.send([part], 1, 0), part))

    def post(self, parts: Sequence[torch.Tensor]) -> Wait:
        """As `Lane` says; the current stream waits, not the host."""
        works = [self._group.recv([part], 0, 0) for part in parts]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def flush(self, seconds: float) -> bool:
        """As `Lane` says."""
        deadline = time.monotonic() + seconds
        while self._held and time.monotonic() < deadline:
            time.sleep(0.001)
            self._release_sent()
        return not self._held

    def close(self) -> None:
        """As `Lane` says: ncclCommFinalize and ncclCommDestroy."""
        self._group.shutdown()

    def abort(self) -> None:
        """As `Lane` says: ncclCommAbort."""
        self._group.abort()

    def _release_sent(self) -> None:
        while self._held and self._held[0][0].is_completed():
            self._held.popleft()


@final
@dataclass(frozen=True, slots=True)
class LaneDevice:
    """A worker's device and CUDA stream; without a driver, the CPU."""

    device: torch.device
    driver: Cuda | None = None
    stream: Stream | None = None

    def receiving(self) -> AbstractContextManager[Any]:
        """The context in which received tensors are allocated: a stream of its own."""
        return nullcontext() if self.driver is None else self.driver.using(self.driver.stream(self.device, "receives"))

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of received tensors until the worker's stream has used them."""
        for tensor in tensors if self.driver is not None and self.stream is not None else ():
            self.driver.keep(tensor, self.stream)  # type: ignore[union-attr]


@final
@dataclass(frozen=True, slots=True)
class Lanes:
    """One worker's lanes, to and from each other worker, and all of them in the order in which they were opened."""

    to: dict[int, Lane]
    source: dict[int, Lane]
    opened: list[Lane]

    def abort(self, other: int) -> None:
        """Abort both lanes between this worker and ``other``."""
        for lanes in (self.to, self.source):
            if other in lanes:
                lanes[other].abort()

    def abort_all(self) -> None:
        """Abort every lane."""
        for lane in self.opened:
            lane.abort()

    def close(self, seconds: float) -> bool:
        """Close every lane normally; return whether all that was sent was received within `seconds`."""
        deadline = time.monotonic() + seconds
        flushed = [lane.flush(max(0.0, deadline - time.monotonic())) for lane in self.to.values()]

        def main() -> None:
            for lane in self.opened:
                lane.close()

        thread = threading.Thread(target=main, name="lanes", daemon=True)
        if all(flushed):
            thread.start()
            thread.join(max(0.0, deadline - time.monotonic()))
        if not all(flushed) or thread.is_alive():
            self.abort_all()
        return all(flushed)


def open_lanes(
    worker: int, others: Sequence[int], make: Callable[[str, bool], Lane], device: LaneDevice, deadline_s: float
) -> Lanes:
    """Open lanes to and from ``others``, and send a byte over each: the first use of a lane waits for its other side.

    All workers open the pairs in the same order, and both directions one after the other, so that no two wait for each
    other.

    Args:
        worker: this worker's number.
        others: the workers that it exchanges messages with.
        make: makes a lane from its name and whether this side sends.
        device: this worker's device.
        deadline_s: seconds that this may take.

    Raises:
        DeadlineError: another worker did not open its side in time.
    """
    lanes = Lanes({}, {}, [])
    broken: list[Exception] = []

    def opened() -> None:
        with device.receiving():
            for first, second in sorted((min(worker, other), max(worker, other)) for other in others):
                for source, target in ((first, second), (second, first)):
                    lane = make(f"{source}>{target}", source == worker)
                    byte = torch.zeros(1, dtype=torch.uint8, device=device.device)
                    lanes.opened.append(lane)
                    if source == worker:
                        lanes.to[target] = lane
                        lane.send([byte])
                    else:
                        lanes.source[source] = lane
                        lane.post([byte])()

    def main() -> None:
        try:
            opened()
        except Exception as fault:  # whatever torch makes of a missing worker
            broken.append(fault)

    thread = threading.Thread(target=main, name="lanes", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive() or broken:
        raise DeadlineError(
            f"worker {worker} opening its lanes to workers {list(others)}",
            got=str(broken[0]).splitlines()[0] if broken else "no answer",
            expected=f"all of them within {deadline_s:g} s",
            remedy="Check that every process has a device of its own (NCCL refuses two on one) and can reach others.",
        )
    return lanes


def announce(message: Message, device_type: str) -> tuple[Message, list[torch.Tensor]]:
    """Return the message for the frame, its first value describing the tensors on the device, and these as bytes."""
    described: list[int] = []
    values: list[Value] = []
    parts: list[torch.Tensor] = []
    for i, value in enumerate(message.values):
        if isinstance(value, torch.Tensor) and value.device.type == device_type:
            described += [i, DTYPES.index(value.dtype), value.dim(), *value.shape]
            values.append(None)
            parts += [value.reshape(-1).view(torch.uint8)] if value.nbytes else []
        else:
            values.append(value)
    frame = Message(message.channel, message.header, (torch.tensor(described, dtype=torch.int64), *values))
    return frame, parts


def allocate_announced(frame: Message, device: torch.device) -> tuple[Message, list[torch.Tensor]]:
    """Return the message that a frame announces, its device tensors allocated but not filled, and these as bytes.

    Raises:
        InternalError: the frame announces what no message may hold.
    """
    first, *values = frame.values
    described = iter(first.tolist() if isinstance(first, torch.Tensor) and first.dim() == 1 else ())
    parts: list[torch.Tensor] = []
    room = MAX_MESSAGE_BYTES
    for i in described:
        dtype, dimensions = next(described, -1), next(described, -1)
        shape = [next(described, -1) for _ in range(min(dimensions, MAX_DIMENSIONS))]
        sound = 0 <= dtype < len(DTYPES) and 0 <= dimensions <= MAX_DIMENSIONS and 0 <= i < len(values)
        room -= math.prod(shape) * DTYPES[dtype].itemsize if sound else 0
        if not sound or min(shape, default=0) < 0 or max(shape, default=0) > MAX_MESSAGE_BYTES or room < 0:
            raise InternalError(
                "a message over NCCL",
                got=f"value {i} of {len(values)}: dtype {dtype}, {dimensions} dimensions, shape {shape}",
                expected="a tensor that a message may hold",
                remedy="Run the same version of Roundelay on every worker.",
            )
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        values[i] = tensor
        parts += [tensor.view(-1).view(torch.uint8)] if tensor.nbytes else []
    return Message(frame.channel, frame.header, tuple(values)), parts
