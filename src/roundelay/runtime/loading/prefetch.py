"""Prefetches batches in a separate thread, the reader: an actor with as many registers as the program says, two.

A register holds one batch of the loader: with two, one is in use while the other is filled. The reader loads while a
register is free, as in OneFlow's runtime (sections 4.3 and 6.1), so that loading, augmenting and copying overlap with
compute, and memory is bounded. The batches and their order are the same as without prefetching.
:mod:`roundelay.actor.data_reader` is the same actor on the simulator's clock.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, perf_counter
from typing import Any, Generic, TypeVar, final

import torch

from roundelay.errors import DeadlineError
from roundelay.runtime.loading.instruction_log import KEPT_MICRO_BATCHES
from roundelay.runtime.processes.child_process import keep_thread_alive
from roundelay.runtime.processes.loader_processes import join_all, without_sigchld_handler
from roundelay.transport.checked_endpoint import next_item

LOOK_S = 0.5
"""Seconds between checks, by a reader without a free register, whether the run is over."""

END_S = 5.0
"""Seconds that an ended run waits for its loader to return; then the loader's processes are killed, if it has any, and
its thread is abandoned."""

ON_WAIT_S = 2.0
"""Seconds of waiting between two calls of ``on_wait``."""

KILL_S = 1.0
"""Seconds to wait for killed loader processes to end."""

ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that a scheduler sends to all processes when a run must end; the launcher handles them for all."""

OnWait = Callable[[str, float], None]
"""Called with what is waited for, and the seconds so far."""

_Item = TypeVar("_Item")


def ignore_wait(what: str, seconds: float) -> None:
    """Do nothing."""


@final
@dataclass(frozen=True, slots=True)
class Registers:
    """Room for the batches of a worker that reads, and the settings of its reader.

    Args:
        count: batches in use, waiting, or being loaded.
        deadline_s: seconds to wait for one batch.
        loads: record of the last loads: number from 0, start and end in seconds of ``time.perf_counter``.
        on_wait: called during long waits, in the waiting thread.
    """

    count: int
    deadline_s: float
    loads: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_MICRO_BATCHES))
    on_wait: OnWait = ignore_wait


def prefetch(source: Generator[_Item, None, None], registers: Registers) -> Generator[_Item, None, None]:
    """Yield what ``source`` yields, prefetched by a thread that lives as long as this generator.

    Args:
        source: iterated and closed by that thread alone.
        registers: limit of items in memory.

    Raises:
        DeadlineError: an item did not come in time.
    """
    reader = _Reader(source, registers)
    patience_s = END_S
    with without_sigchld_handler():
        reader.start()
        try:
            while (item := reader.take()) is not None:
                yield item[0]
                reader.free.release()
        except DeadlineError:
            patience_s = 0.0  # it has had its deadline
            raise
        finally:
            reader.over.set()
            reader.free.release()
            if not reader.ended.wait(patience_s):
                _end(reader.processes)


def note_request(request: str, processes: Sequence[Any] = ()) -> None:
    """Record, in a reader thread, what is requested of the loader, and the loader's processes."""
    reader = threading.current_thread()
    if isinstance(reader, _Reader):
        reader.request, reader.processes = request, processes


def set_held_up(held_up: bool) -> None:
    """Record, in a reader thread, whether the loader waits for the process's random generators."""
    reader = threading.current_thread()
    if isinstance(reader, _Reader):
        reader.held_up = held_up


def _end(processes: Sequence[Any]) -> None:
    """Kill unresponsive processes of a loader, which also wakes a reader that waits for them.

    They block SIGTERM, which a scheduler sends to all processes while the run still needs them.
    """
    for process in processes:
        process.kill()
    join_all(processes, KILL_S)


@final
class _Reader(threading.Thread, Generic[_Item]):
    """The thread that fills free registers until the source ends or fails, or the consumer stops."""

    def __init__(self, source: Generator[_Item, None, None], registers: Registers) -> None:
        super().__init__(name="roundelay-reader", daemon=True)
        self.free = threading.Semaphore(registers.count)
        self.over, self.ended = threading.Event(), threading.Event()
        #: what is requested of the loader, and its processes
        self.request = ""
        self.processes: Sequence[Any] = ()
        #: whether the loader waits for the process's random generators
        self.held_up = False
        self._source, self._registers, self._numbers = source, registers, count()
        self._filled: queue.SimpleQueue[tuple[_Item] | BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Read; then keep the thread, as the loader's processes may be needed after the reading."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # inherited by the loader's processes, which a run still needs
        self._read()
        self.ended.set()
        keep_thread_alive()

    def _read(self) -> None:
        torch.set_num_threads(1)  # the data are the same however many a run computes with, and leave it its cores
        try:
            with closing(self._source):
                while self._may_go_on():
                    self._filled.put((self._load(),))
        except StopIteration:
            self._filled.put(None)
        except BaseException as error:  # of the user's loader: raised in the consumer
            self._filled.put(error)

    def _may_go_on(self) -> bool:
        """Wait for a free register; False if the consumer has stopped."""
        while not self.free.acquire(timeout=LOOK_S):
            if self.over.is_set():
                return False
        return not self.over.is_set()

    def _load(self) -> _Item:
        """Load the next item of the source and record its times."""
        start = perf_counter()
        item = next(self._source)
        self._registers.loads.append((next(self._numbers), start, perf_counter()))
        return item

    def take(self) -> tuple[_Item] | None:
        """Return the next item, in a tuple; None at the end."""
        item = self._wait()
        if isinstance(item, BaseException):
            raise item
        return item

    def _wait(self) -> tuple[_Item] | BaseException | None:
        """Wait for the next result of the thread."""
        began, deadline_s = monotonic(), self._registers.deadline_s
        while (left := deadline_s - (monotonic() - began)) > 0:
            with suppress(queue.Empty):
                return next_item(self._filled, min(left, ON_WAIT_S))
            self._registers.on_wait(self.request or "the data", monotonic() - began)
        subject = f"the data: {self.request}" if self.request else "the data"
        if self.held_up:
            raise DeadlineError(
                subject,
                got=f"no batch for {deadline_s:g} s from a loader that waits for the process's random generators: "
                "`evaluate` holds them, or a loader that was abandoned before",
                expected="one within deadline_s",
                remedy="Raise deadline_s (--deadline-s, or in the plan) beyond what `evaluate` takes, or use "
                "--transport shm: there it runs in a process of its own.",
            )
        raise DeadlineError(
            subject,
            got=f"no batch from the loader for {deadline_s:g} s",
            expected="one within deadline_s",
            remedy="Check what the job's batches(epoch) waits for; raise deadline_s (--deadline-s, or in the plan) if "
            "a batch takes longer. Preparation needed only once can move to job(seed), which has no deadline.",
        )
