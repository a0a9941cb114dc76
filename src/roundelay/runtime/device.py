"""Where a worker computes: what a device other than the CPU needs besides, asked once at the start.

On the CPU nothing is added: the loop, the handlers and the data are the very same objects. On a CUDA device a worker
has a stream of its own, and

- micro-batches are copied ahead (:meth:`AcceleratorDevice.feed`): the copy of the next one is issued when the previous
one
  begins, from pinned memory, on a stream of its own. At most :data:`REGISTERS` are on the device; in OneFlow's words
  the copy is an actor of its own with two registers, so that it overlaps with compute (OneFlow, sections 4.3 and 6.1);
- an instruction's span is measured by events in the worker's stream (:class:`Spans`), for on the host its end is only
  that of giving the work to the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from time import perf_counter
from typing import Any, final

import torch

from roundelay.actor.machine import Run
from roundelay.errors import PlanError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.transports import transport_named
from roundelay.lower.validate_plan import CPU
from roundelay.runtime.handlers import Context, Handler
from roundelay.runtime.instruction_log import KEPT_MICRO_BATCHES, Told
from roundelay.transport.cuda import Cuda, Event, Stream
from roundelay.transport.nccl_p2p import Place

REGISTERS = 2
"""Micro-batches that stage 0 holds on its device before their forward: one in use, one under way."""

KNOWN_SPANS = 16 * KEPT_MICRO_BATCHES
"""Spans that are kept; the worker's log keeps at most nine instructions of a micro-batch, two stages and a read."""

HELD_SPANS = 256
"""Pairs of events that wait to be read before the oldest are looked at."""

Entry = tuple[MicroBatch, dict[str, torch.Tensor]]
Data = Generator[Entry, None, None]
Handlers = Mapping[str, Handler]


def present() -> int:
    """CUDA devices here; asking does not start CUDA, so that workers can still be forked."""
    return torch.cuda.device_count()


def named(devices: str | None, num_workers: int, transport: str) -> tuple[str, ...]:
    """The device of every worker.

    Args:
        devices: ``cpu``, ``cuda`` (worker k on device k, counted around), or one name for each worker, with commas. By
            default ``cuda`` where there is such a device and the transport can carry its tensors.
        num_workers: D.
        transport: of the plan.

    Raises:
        PlanError: the list is not one per worker, or a device is not here.
    """
    text = devices or ("cuda" if present() and not transport_named(transport).forks else CPU)
    names = (text,) * num_workers if text in (CPU, "cuda") else tuple(name.strip() for name in text.split(","))
    if text == "cuda" and present():
        names = tuple(f"cuda:{k % present()}" for k in range(num_workers))
    if len(names) != num_workers:
        raise PlanError(
            "--devices",
            got=f"{len(names)} devices for {num_workers} workers: {text}",
            expected="cpu, cuda, or one device for each worker, such as cuda:0,cuda:1",
            remedy="Name one for each worker, or give --workers.",
        )
    check_here(names)
    return names


def check_here(devices: tuple[str, ...]) -> None:
    """Refuse devices that this host does not have; what no device can be called, the plan's own check tells.

    Raises:
        PlanError: naming the first.
    """
    known = [CPU, *(f"cuda:{i}" for i in range(present()))]
    for k, name in enumerate(devices):
        if name.startswith("cuda") and name not in known:
            raise PlanError(
                f"the device of stage {k}",
                got=f"{name}: no such device here",
                expected="one of " + ", ".join(known) + ("" if present() else ": torch sees no CUDA device here"),
                remedy="Name other --devices, or correct `device` in the plan; --devices cpu always works.",
            )


class Device(ABC):
    """Where one worker computes."""

    place: torch.device
    """As torch calls it."""

    @abstractmethod
    def active(self) -> AbstractContextManager[Any]:
        """While this lasts, the calling thread computes here."""

    @abstractmethod
    def lane_end(self) -> Place:
        """Where tensors lie that come and go on lanes."""

    @abstractmethod
    def feed(self, data: Data) -> Data:
        """Micro-batches, their tensors on this device."""

    @abstractmethod
    def watched(self, handlers: Handlers) -> Handlers:
        """The handlers, their spans measured where the worker's own clock would not tell."""

    @abstractmethod
    def spans(self, told: list[Told], dropped: int) -> list[Told]:
        """Instructions in order with true spans, at the run's end; ``dropped`` came before them."""

    @abstractmethod
    def busy_s(self, on_host_s: float) -> float:
        """Seconds computed so far, given those that the worker's own clock counts."""


@final
class CpuDevice(Device):
    """The CPU: everything is as it is.

    Args:
        watch: put around the handlers.
    """

    place = torch.device(CPU)

    def __init__(self, watch: Callable[[Handlers], Handlers] = lambda handlers: handlers) -> None:
        self._watch = watch

    def active(self) -> AbstractContextManager[Any]:
        """Nothing changes."""
        return nullcontext()

    def lane_end(self) -> Place:
        """On the CPU."""
        return Place(self.place)

    def feed(self, data: Data) -> Data:
        """The data itself."""
        return data

    def watched(self, handlers: Handlers) -> Handlers:
        """As whoever made this device wants it; else the handlers themselves."""
        return self._watch(handlers)

    def spans(self, told: list[Told], dropped: int) -> list[Told]:
        """As they are."""
        return told

    def busy_s(self, on_host_s: float) -> float:
        """As counted."""
        return on_host_s


HOST = CpuDevice()


@final
class AcceleratorDevice(Device):
    """A CUDA device, with streams of this worker's own.

    Args:
        place: the device.
        driver: how it is asked.
    """

    def __init__(self, place: torch.device, driver: Cuda) -> None:
        self.place, self._driver = place, driver
        self.stream = driver.stream(place)
        self._copies = driver.stream(place)
        self._spans = Spans(driver, self.stream)

    def active(self) -> AbstractContextManager[Any]:
        """The thread's work goes to the worker's stream; weights are made there too, so no memory changes hands."""
        return self._driver.using(self.stream)

    def lane_end(self) -> Place:
        """On the device, used by the worker's stream."""
        return Place(self.place, self._driver, self.stream)

    def feed(self, data: Data) -> Data:
        """See the module's docstring: a register is filled as soon as the one before it is in use."""
        registers: deque[tuple[Entry, Event]] = deque()
        with closing(data):
            while self._fill(registers, data):
                (header, values), copied = registers.popleft()
                self._fill(registers, data)
                self.stream.wait_event(copied)
                for tensor in values.values():
                    self._driver.keep(tensor, self.stream)
                yield header, values

    def _fill(self, registers: deque[tuple[Entry, Event]], data: Iterator[Entry]) -> bool:
        """Issue copies until the register that is not in use is full, or the data ends; whether any is there."""
        while len(registers) < REGISTERS - 1:
            entry = next(data, None)
            if entry is None:
                break
            header, values = entry
            with self._driver.using(self._copies):
                copies = {n: self._driver.pinned(v).to(self.place, non_blocking=True) for n, v in values.items()}
            copied = self._driver.event()
            copied.record(self._copies)
            registers.append(((header, copies), copied))
        return bool(registers)

    def watched(self, handlers: Handlers) -> Handlers:
        """The handlers between two events; ``read`` is the host's own work, and its clock tells."""
        return {opcode: self._spans.around(handler, opcode != "read") for opcode, handler in handlers.items()}

    def spans(self, told: list[Told], dropped: int) -> list[Told]:
        """With the spans that the events tell; waits until all work is done."""
        self.stream.synchronize()
        return self._spans.told(told, dropped)

    def busy_s(self, on_host_s: float) -> float:
        """Of the instructions that are known to have ended."""
        self._spans.read()
        return self._spans.busy_s


@final
class Spans:
    """Starts and ends of instructions in a stream, in the host's seconds.

    Each time is that of the event before it plus the milliseconds between the two, which CUDA tells in single
    precision: measured from the run's start they would be rounded to a quarter of a millisecond after an hour.

    Args:
        driver: makes events.
        stream: the worker's.
    """

    def __init__(self, driver: Cuda, stream: Stream) -> None:
        self._driver, self._stream = driver, stream
        self._waiting: deque[tuple[int, Event, Event]] = deque()
        self._known: dict[int, tuple[float, float]] = {}
        self._count = 0
        self.busy_s = 0.0
        self._last = driver.event(timing=True)
        self._last.record(stream)
        self._last.synchronize()
        self._last_s = perf_counter()

    def around(self, handler: Handler, measured: bool) -> Handler:
        """The handler, its place among all instructions counted, and its span noted if asked for."""

        def counted(context: Context, run: Run) -> MicroBatch | None:
            self._count += 1
            return handler(context, run)

        def timed(context: Context, run: Run) -> MicroBatch | None:
            start, end = self._driver.event(timing=True), self._driver.event(timing=True)
            start.record(self._stream)
            header = handler(context, run)
            end.record(self._stream)
            self._waiting.append((self._count, start, end))
            self._count += 1
            if len(self._waiting) > HELD_SPANS:
                self.read()
            return header

        return timed if measured else counted

    def read(self) -> None:
        """Read the events that have been passed, oldest first, and let them go."""
        while self._waiting and self._waiting[0][2].query():
            index, start, end = self._waiting.popleft()
            start_s = self._last_s + self._last.elapsed_time(start) / 1e3
            self._last, self._last_s = end, start_s + start.elapsed_time(end) / 1e3
            self._known[index] = (start_s, self._last_s)
            if len(self._known) > KNOWN_SPANS:
                del self._known[next(iter(self._known))]
            self.busy_s += self._last_s - start_s

    def told(self, told: list[Told], dropped: int) -> list[Told]:
        """``told``, before which ``dropped`` are gone, with what has been measured in place of the host's spans."""
        self.read()
        return [(row[0], row[1], *self._known.get(i, row[2:4]), row[4]) for i, row in enumerate(told, dropped)]


@contextmanager
def repeatable(devices: tuple[str, ...]) -> Iterator[None]:
    """While this lasts, operations on these devices give the same bits when they are repeated.

    On the CPU they do anyway. For CUDA torch takes deterministic kernels where it has them and warns where it has none;
    its matrix products ask for ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment, or warn as well.
    """
    if all(name == CPU for name in devices):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    searches, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = searches


def device_of(name: str) -> Device:
    """The device of this name, for the worker that asks.

    Raises:
        PlanError: it is not here.
    """
    check_here((name,))
    return HOST if name == CPU else AcceleratorDevice(torch.device(name), Cuda())
