"""Data read ahead by a thread of its own: an actor with as many registers as the program says, two.

A register holds what the loader yields, one batch: with two of them one is in use while the other is filled. The reader
begins when a register is free and waits when none is, as in OneFlow's runtime (sections 4.3 and 6.1): loading,
augmenting and copying overlap with compute, and no more memory is taken. What is read, and in which order, is the same
as in line. :mod:`roundelay.actor.reader` is the same actor on the simulator's clock.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Generic, TypeVar, final

from roundelay.errors import DeadlineError
from roundelay.runtime.log import KEPT_MICRO_BATCHES

LOOK_S = 0.5
"""Seconds after which a reader without a free register looks whether anybody is still there."""

END_S = 5.0
"""Seconds that an ended run waits for its loader to come back; after that it is left to itself."""

_Item = TypeVar("_Item")


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
    """

    count: int
    deadline_s: float
    loads: deque[tuple[int, float, float]] = field(default_factory=_kept)


def ahead(source: Generator[_Item, None, None], registers: Registers) -> Generator[_Item, None, None]:
    """What ``source`` yields, made ahead as far as there are registers; the thread begins and ends with this generator.

    Args:
        source: read, and closed, by the thread alone.
        registers: what it is loaded into, an item each.

    Raises:
        DeadlineError: an item did not come in time.
    """
    reader = _Reader(source, registers)
    reader.start()
    try:
        while (item := reader.take()) is not None:
            yield item[0]
            reader.free.release()
    finally:
        reader.over.set()
        reader.free.release()
        reader.join(END_S)


@final
class _Reader(threading.Thread, Generic[_Item]):
    """The thread: fills free registers until the source ends, fails, or is not wanted any more."""

    def __init__(self, source: Generator[_Item, None, None], registers: Registers) -> None:
        super().__init__(name="roundelay-reader", daemon=True)
        self.free = threading.Semaphore(registers.count)
        self.over = threading.Event()
        self._source, self._registers, self._numbers = source, registers, count()
        self._filled: queue.SimpleQueue[tuple[_Item] | BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        """See the class."""
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
        deadline_s = self._registers.deadline_s
        try:
            item = self._filled.get(timeout=deadline_s)
        except queue.Empty:
            raise DeadlineError(
                "the data",
                got=f"no batch from the loader for {deadline_s:g} s",
                expected="one within the plan's deadline_s",
                remedy="See what the job's batches(epoch) waits for; raise deadline_s if a batch takes longer.",
            ) from None
        if isinstance(item, BaseException):
            raise item
        return item
