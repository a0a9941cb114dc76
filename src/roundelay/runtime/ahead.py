"""Data read ahead by a thread of its own: an actor with two registers.

A register holds what the loader yields, one batch: with two of them one is in use while the other is filled. The reader
begins when a register is free and waits when none is, as in OneFlow's runtime (sections 4.3 and 6.1): loading,
augmenting and copying overlap with compute, and no more memory is taken. What is read, and in which order, is the same
as in line.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import closing
from typing import Generic, TypeVar, final

from roundelay.errors import DeadlineError

REGISTERS = 2
"""Batches in use, waiting, or being read."""

LOOK_S = 0.5
"""Seconds after which a reader without a free register looks whether anybody is still there."""

END_S = 5.0
"""Seconds that an ended run waits for its loader to come back; after that it is left to itself."""

_Item = TypeVar("_Item")


def ahead(source: Generator[_Item, None, None], deadline_s: float) -> Generator[_Item, None, None]:
    """What ``source`` yields, made up to :data:`REGISTERS` ahead; the thread begins and ends with this generator.

    Args:
        source: read, and closed, by the thread alone.
        deadline_s: seconds that one item is waited for.

    Raises:
        DeadlineError: it did not come in time.
    """
    reader = _Reader(source)
    reader.start()
    try:
        while (item := reader.take(deadline_s)) is not None:
            yield item[0]
            reader.free.release()
    finally:
        reader.over.set()
        reader.free.release()
        reader.join(END_S)


@final
class _Reader(threading.Thread, Generic[_Item]):
    """The thread: fills free registers until the source ends, fails, or is not wanted any more."""

    def __init__(self, source: Generator[_Item, None, None]) -> None:
        super().__init__(name="roundelay-reader", daemon=True)
        self.free = threading.Semaphore(REGISTERS)
        self.over = threading.Event()
        self._source = source
        self._filled: queue.SimpleQueue[tuple[_Item] | BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        """See the class."""
        try:
            with closing(self._source):
                while self._may_go_on():
                    self._filled.put((next(self._source),))
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

    def take(self, deadline_s: float) -> tuple[_Item] | None:
        """The next item, in a tuple; None at the end."""
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
