"""The reader as an actor on any clock: it loads a batch as soon as a register is free, and stops where none is.

This is what the thread of :mod:`roundelay.runtime.prefetch` does, told without threads: a register is in use from the
moment at which a batch begins to be loaded into it until the worker asks for the batch behind it (OneFlow, sections
4.3 and 6.1). The thread does the same with batches; the first of an epoch costs it two, for it looks one batch ahead to
know where the epoch ends.
"""

from __future__ import annotations

from itertools import accumulate
from typing import final

from roundelay.ir.micro_batch import Load


@final
class Reader:
    """Loads the batches of one worker in order.

    Args:
        worker: which one.
        registers: batches in use, waiting, or being loaded; at least 1.
    """

    def __init__(self, worker: int, registers: int) -> None:
        self._worker, self._registers = worker, registers
        self._asked: list[float] = []
        #: what has been loaded, in order
        self.loads: list[Load] = []

    def ask(self, batch: int, seconds: float, now: float) -> float:
        """The worker is done with what it has read before and asks for a micro-batch; when that is there.

        Args:
            batch: number of its batch; asked for again, it is there.
            seconds: that this batch takes to load.
            now: the time, not before that of the last call.
        """
        if self.loads and self.loads[-1].batch == batch:
            return now
        self._asked.append(now)
        freed = self._asked[max(0, len(self._asked) - self._registers)]
        start = max(freed, self.loads[-1].end_s) if self.loads else freed
        self.loads.append(Load(self._worker, batch, start, start + seconds))
        return max(now, start + seconds)

    @property
    def peak(self) -> int:
        """Most registers that were in use at one time."""
        changes = [(load.start_s, 1) for load in self.loads] + [(freed, -1) for freed in self._asked[1:]]
        return max(accumulate(change for _, change in sorted(changes)), default=0)
