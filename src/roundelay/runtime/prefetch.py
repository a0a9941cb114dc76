"""Data read ahead by a thread of its own: an actor with as many registers as the program says, two.

A register holds what the loader yields, one batch: with two of them one is in use while the other is filled. The reader
begins when a register is free and waits when none is, as in OneFlow's runtime (sections 4.3 and 6.1): loading,
augmenting and copying overlap with compute, and no more memory is taken. What is read, and in which order, is the same
as in line. :mod:`roundelay.actor.reader` is the same actor on the simulator's clock.
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

from roundelay.errors import DeadlineError
from roundelay.runtime.child_process import outlast
from roundelay.runtime.instruction_log import KEPT_MICRO_BATCHES
from roundelay.runtime.loader_processes import loaders_unheard
from roundelay.transport.checked_endpoint import next_item

LOOK_S = 0.5
"""Seconds after which a reader without a free register looks whether anybody is still there."""

END_S = 5.0
"""Seconds that an ended run waits for its loader to come back; then the loader's processes are ended, if it has any,
and its thread is left to itself."""

TELL_S = 2.0
"""Seconds of waiting after which it is told, again and again."""

KILL_S = 1.0
"""Seconds in which loaders' processes that were killed must have ended."""

ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler tells all processes that a run must end: its launcher ends it in good order."""

Tell = Callable[[str, float], None]
"""Told what is waited for, and how many seconds so far."""

_Item = TypeVar("_Item")


def silent(what: str, seconds: float) -> None:
    """Tell nobody."""


def _kept() -> deque[tuple[int, float, float]]:
    return deque(maxlen=KEPT_MICRO_BATCHES)


@final
@dataclass(frozen=True, slots=True)
class Registers:
    """Where a worker that reads holds its data, a batch in each.

    Args:
        count: batches in use, waiting, or being loaded.
        deadline_s: seconds that one batch is waited for.
        loads: where the reader notes what it has loaded, counted from 0, and when it began and ended, in seconds of
            ``time.perf_counter``; the last ones are kept.
        tell: told of long waits, in the thread that waits.
    """

    count: int
    deadline_s: float
    loads: deque[tuple[int, float, float]] = field(default_factory=_kept)
    tell: Tell = silent


def prefetch(source: Generator[_Item, None, None], registers: Registers) -> Generator[_Item, None, None]:
    """What ``source`` yields, made ahead as far as there are registers; the thread begins and ends with this generator.

    Args:
        source: read, and closed, by the thread alone.
        registers: what it is loaded into, an item each.

    Raises:
        DeadlineError: an item did not come in time.
    """
    reader = _Reader(source, registers)
    patience_s = END_S
    with loaders_unheard():
        reader.start()
        try:
            while (item := reader.take()) is not None:
                yield item[0]
                reader.free.release()
        except DeadlineError:
            patience_s = 0.0  # it has had its time
            raise
        finally:
            reader.over.set()
            reader.free.release()
            if not reader.ended.wait(patience_s):
                _end(reader.processes)


def note(asked: str, processes: Sequence[Any] = ()) -> None:
    """Say what the loader is asked for next, and which processes of its own work at it; heard in a reader's thread."""
    reader = threading.current_thread()
    if isinstance(reader, _Reader):
        reader.asked, reader.processes = asked, processes


def hold_up(held_up: bool) -> None:
    """Say whether the loader waits for the random generators; heard in a reader's thread."""
    reader = threading.current_thread()
    if isinstance(reader, _Reader):
        reader.held_up = held_up


def _end(processes: Sequence[Any]) -> None:
    """Kill processes that a loader has started and that do not answer; a reader that waits for them wakes up.

    They are deaf to SIGTERM, which a scheduler sends to all while the run still needs them.
    """
    for process in processes:
        process.kill()
    deadline = monotonic() + KILL_S  # for all of them together
    for process in processes:
        process.join(max(0.0, deadline - monotonic()))


def _kept_waiting(asked: str, deadline_s: float) -> DeadlineError:
    """Of a loader that waits for the generators, which in a worker's own process an evaluation may have."""
    return DeadlineError(
        f"the data: {asked}" if asked else "the data",
        got=f"no batch for {deadline_s:g} s from a loader that waits for the process's random generators: `evaluate` "
        "has them, or a loader that was given up before",
        expected="one within deadline_s",
        remedy="Raise deadline_s (--deadline-s, or in the plan) beyond what `evaluate` takes, or use --transport shm: "
        "there it runs in a process of its own.",
    )


@final
class _Reader(threading.Thread, Generic[_Item]):
    """The thread: fills free registers until the source ends, fails, or is not wanted any more."""

    def __init__(self, source: Generator[_Item, None, None], registers: Registers) -> None:
        super().__init__(name="roundelay-reader", daemon=True)
        self.free = threading.Semaphore(registers.count)
        self.over, self.ended = threading.Event(), threading.Event()
        #: what the loader has been asked for, and the processes that it has for it
        self.asked = ""
        self.processes: Sequence[Any] = ()
        #: whether it waits for the random generators that the loader needs
        self.held_up = False
        self._source, self._registers, self._numbers = source, registers, count()
        self._filled: queue.SimpleQueue[tuple[_Item] | BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        """See the class. A loader's processes may outlive the reading: they are as old as this process, not as this."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # inherited by the loader's processes: the run needs them yet
        self._read()
        self.ended.set()
        outlast()

    def _read(self) -> None:
        try:
            with closing(self._source):
                while self._may_go_on():
                    self._filled.put((self._load(),))
        except StopIteration:
            self._filled.put(None)
        except BaseException as error:  # the person's loader: told where it is waited for
            self._filled.put(error)

    def _may_go_on(self) -> bool:
        """Wait for a free register; False if nobody wants more."""
        while not self.free.acquire(timeout=LOOK_S):
            if self.over.is_set():
                return False
        return not self.over.is_set()

    def _load(self) -> _Item:
        """The next item of the source, noted with its time."""
        start = perf_counter()
        item = next(self._source)
        self._registers.loads.append((next(self._numbers), start, perf_counter()))
        return item

    def take(self) -> tuple[_Item] | None:
        """The next item, in a tuple; None at the end."""
        item = self._wait()
        if isinstance(item, BaseException):
            raise item
        return item

    def _wait(self) -> tuple[_Item] | BaseException | None:
        """What the thread puts down next."""
        began, deadline_s = monotonic(), self._registers.deadline_s
        while (left := deadline_s - (monotonic() - began)) > 0:
            with suppress(queue.Empty):
                return next_item(self._filled, min(left, TELL_S))
            self._registers.tell(self.asked or "the data", monotonic() - began)
        if self.held_up:
            raise _kept_waiting(self.asked, deadline_s)
        raise DeadlineError(
            f"the data: {self.asked}" if self.asked else "the data",
            got=f"no batch from the loader for {deadline_s:g} s",
            expected="one within deadline_s",
            remedy="See what the job's batches(epoch) waits for; raise deadline_s (--deadline-s, or in the plan) if a "
            "batch takes longer. What is prepared once may stand in job(seed), which is waited for.",
        )
