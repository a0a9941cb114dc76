"""The device on which a worker computes, and what a CUDA device needs in addition to the CPU.

On the CPU nothing is added: loop, handlers and data stay the same objects. On a CUDA device a worker has a stream of
its own, and

- micro-batches are prefetched (:meth:`AcceleratorDevice.feed`): the copy of the next one is issued when the previous
  one begins, from pinned memory, on a second stream. At most :data:`REGISTERS` are on the device. In OneFlow's terms
  the copy is an actor of its own with two registers, so that it overlaps with compute (OneFlow, sections 4.3 and 6.1);
- an instruction's span is measured by events in the worker's stream (:class:`Spans`): on the host it ends when its work
  has been issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from time import perf_counter
from typing import Any, final

import torch

from roundelay.actor.machine import Run
from roundelay.errors import PlanError
from roundelay.ir.device_names import CPU, check_number, listed_devices
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.transports import transport_named
from roundelay.runtime.handlers import Context, Entry, Handler
from roundelay.runtime.loading.instruction_log import KEPT_INSTRUCTIONS, LogEntry
from roundelay.runtime.processes.device_failure import RecentIntegers, device_error
from roundelay.runtime.processes.user_errors import explain_error
from roundelay.transport.cuda import Cuda, Event, Stream
from roundelay.transport.nccl_p2p import LaneDevice

REGISTERS = 2
"""Micro-batches that stage 0 holds on its device before their forward: one in use, one being copied."""

KNOWN_SPANS = KEPT_INSTRUCTIONS
"""Spans that are kept; the worker's log keeps at most nine instructions of a micro-batch, two stages and a read."""

HELD_SPANS = 256
"""Pairs of events that may wait before the oldest are read."""

Data = Generator[Sequence[Entry], None, None]
Handlers = Mapping[str, Handler]


def num_cuda_devices() -> int:
    """CUDA devices of this host. The call does not initialise CUDA, so workers can still be forked."""
    return torch.cuda.device_count()


def default_devices(transport: str) -> str:
    """``cuda`` if there is such a device and the transport can carry its tensors, else ``cpu``."""
    return "cuda" if num_cuda_devices() and not transport_named(transport).forks else CPU


def resolve_devices(devices: str | None, num_workers: int, transport: str) -> tuple[str, ...]:
    """The device of every worker, from the option ``--devices``.

    Args:
        devices: ``cpu``, ``cuda`` (worker k on device k modulo their number), or one name for each worker, separated by
            commas. By default ``cuda`` if there is such a device and the transport can carry its tensors.
        num_workers: D.
        transport: of the plan.

    Raises:
        PlanError: the list is not one per worker, or this host does not have a device.
    """
    text = devices or default_devices(transport)
    names = listed_devices(text) or (text,) * num_workers
    if text == "cuda" and num_cuda_devices():
        names = tuple(f"cuda:{k % num_cuda_devices()}" for k in range(num_workers))
    check_number(names, num_workers, text)
    check_devices_exist(names)
    return names


def check_devices_exist(devices: tuple[str, ...]) -> None:
    """Refuse devices that this host does not have. Malformed names are refused by the plan's validation.

    Raises:
        PlanError: naming the first such device.
    """
    known = [CPU, *(f"cuda:{i}" for i in range(num_cuda_devices()))]
    for k, name in enumerate(devices):
        if name.startswith("cuda") and name not in known:
            raise PlanError(
                f"the device of stage {k}",
                got=f"{name}: no such device here",
                expected="one of "
                + ", ".join(known)
                + ("" if num_cuda_devices() else ": torch sees no CUDA device here"),
                remedy="Name other --devices, or correct `device` in the plan; --devices cpu always works.",
            )


class Device:
    """The device on which one worker computes: the CPU, if no method is overridden.

    Args:
        wrap_handlers: called with the handlers; returns those to use.
    """

    torch_device = torch.device(CPU)
    """The device as torch knows it."""

    def __init__(self, wrap_handlers: Callable[[Handlers], Handlers] = lambda handlers: handlers) -> None:
        self._wrap_handlers = wrap_handlers

    def active(self) -> AbstractContextManager[Any]:
        """A context in which the calling thread computes on this device."""
        return nullcontext()

    def lane_device(self) -> LaneDevice:
        """Where tensors are stored that are sent and received on lanes."""
        return LaneDevice(self.torch_device)

    def feed(self, data: Data) -> Data:
        """Micro-batches with the tensors of this replica's on this device."""
        return data

    def instrumented(self, handlers: Handlers) -> Handlers:
        """The handlers, with their spans measured where the worker's clock cannot."""
        return self._wrap_handlers(handlers)

    def spans(self, events: list[LogEntry], dropped: int) -> list[LogEntry]:
        """Logged instructions with their measured spans, at the run's end; ``dropped`` more came before them."""
        return events

    def explain(self, error: BaseException, where: str, g: int) -> BaseException:
        """An error of an instruction of micro-batch ``g`` with its place, as a person is told it."""
        return explain_error(error, where)

    def busy_s(self, on_host_s: float) -> float:
        """Seconds computed so far.

        Args:
            on_host_s: what the worker's own clock has counted.
        """
        return on_host_s

    def peak_bytes(self) -> int | None:
        """Most bytes of the device that this process has had at one time since it made it; None on the CPU."""
        return None


HOST = Device()


@final
class AcceleratorDevice(Device):
    """A CUDA device, with streams of this worker's own.

    Args:
        torch_device: the device.
        driver: the interface to CUDA.
        worker: whose; one of that number has the same streams in every run of the process.
        recent: where the integers of micro-batches are kept, by all devices of the run.
    """

    def __init__(
        self, torch_device: torch.device, driver: Cuda, worker: int = 0, recent: RecentIntegers | None = None
    ) -> None:
        super().__init__()
        self.torch_device, self._driver, self._recent = torch_device, driver, recent
        self.stream = driver.stream(torch_device, f"worker {worker}")
        self._copies = driver.stream(torch_device, f"copies for worker {worker}")
        self._spans = Spans(driver, self.stream)
        driver.reset_peak(torch_device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context whose work goes to the worker's stream; weights are allocated there too.

        A backward runs in the thread that asks for it: torch's own thread for the device would queue those of workers
        that share it.
        """
        with self._driver.using(self.stream), torch.autograd.set_multithreading_enabled(False):
            yield

    def lane_device(self) -> LaneDevice:
        """The device, with the worker's stream."""
        return LaneDevice(self.torch_device, self._driver, self.stream)

    def feed(self, data: Data) -> Data:
        """Copy each micro-batch while the previous one is in use; see the module's docstring."""
        registers: deque[tuple[Sequence[Entry], Event]] = deque()
        with closing(data):
            while self._fill(registers, data):
                dealt, copied = registers.popleft()
                self._fill(registers, data)
                self.stream.wait_event(copied)
                for tensor in dealt[0][1].values():
                    self._driver.keep(tensor, self.stream)
                yield dealt

    def _fill(self, registers: deque[tuple[Sequence[Entry], Event]], data: Iterator[Sequence[Entry]]) -> bool:
        """Issue copies until every unused register is full, or the data ends; returns whether any is full."""
        while len(registers) < REGISTERS - 1:
            dealt = next(data, None)
            if dealt is None:
                break
            (header, values), *others = dealt
            if self._recent is not None:
                self._recent.note(header.g, values)
            with self._driver.using(self._copies):
                copies = {n: self._driver.pinned(v).to(self.torch_device, non_blocking=True) for n, v in values.items()}
            copied = self._driver.event()
            copied.record(self._copies)
            registers.append((((header, copies), *others), copied))
        return bool(registers)

    def instrumented(self, handlers: Handlers) -> Handlers:
        """The handlers between two events each; ``read`` computes on the host, whose clock measures it."""
        return {opcode: self._spans.around(handler, opcode != "read") for opcode, handler in handlers.items()}

    def spans(self, events: list[LogEntry], dropped: int) -> list[LogEntry]:
        """The events with spans from CUDA; waits until all work is done."""
        self.stream.synchronize()
        return self._spans.apply(events, dropped)

    def explain(self, error: BaseException, where: str, g: int) -> BaseException:
        """As on the CPU; for a lack of memory or a failure of the device, what is known of it."""
        subject = f"{where} on {self.torch_device}"
        asserted = self._recent is not None and isinstance(error, torch.AcceleratorError)
        wrong = self._recent.wrong(g) if asserted else ""  # type: ignore[union-attr]
        return device_error(subject, error, wrong) or explain_error(error, where)

    def busy_s(self, on_host_s: float) -> float:
        """Seconds of the instructions that are known to have ended, whatever the worker has counted."""
        self._spans.read()
        return self._spans.busy_s

    def peak_bytes(self) -> int | None:
        """Of all workers of this process on the device, since the last of them was made."""
        return self._driver.peak_bytes(self.torch_device)


@final
class Spans:
    """Starts and ends of instructions in a stream, in seconds of the host's clock.

    Each time is that of the previous event plus the milliseconds between the two, which CUDA returns in single
    precision: measured from the run's start they would be rounded to a quarter of a millisecond after an hour.

    Args:
        driver: creates events.
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
        """The handler, counted among all instructions, with its span measured if ``measured``."""

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
        """Read the events that the stream has passed, oldest first, and release them."""
        while self._waiting and self._waiting[0][2].query():
            index, start, end = self._waiting.popleft()
            start_s = self._last_s + self._last.elapsed_time(start) / 1e3
            self._last, self._last_s = end, start_s + start.elapsed_time(end) / 1e3
            self._known[index] = (start_s, self._last_s)
            if len(self._known) > KNOWN_SPANS:
                del self._known[next(iter(self._known))]
            self.busy_s += self._last_s - start_s

    def apply(self, events: list[LogEntry], dropped: int) -> list[LogEntry]:
        """The events, of which ``dropped`` earlier ones are missing, with measured spans instead of the host's."""
        self.read()
        return [(row[0], row[1], *self._known.get(i, row[2:4]), row[4]) for i, row in enumerate(events, dropped)]


def make_device(name: str, worker: int = 0, recent: RecentIntegers | None = None) -> Device:
    """The device of this name, for one worker; see :class:`AcceleratorDevice`.

    Raises:
        PlanError: this host does not have it.
    """
    check_devices_exist((name,))
    return HOST if name == CPU else AcceleratorDevice(torch.device(name), Cuda(), worker, recent)
