"""The reader on a virtual clock: it loads the next batch as soon as a register is free.

It models the prefetching thread of :mod:`roundelay.runtime.loading.prefetch`: a register is in use from the moment at
which a batch starts being loaded into it until the worker requests the batch after it (OneFlow, sections 4.3 and 6.1).
The one difference is that the thread loads two batches at the start of an epoch, since it looks one batch ahead to know
where the epoch ends.
"""

from __future__ import annotations

from itertools import accumulate
from typing import final

from roundelay.ir.micro_batch import Load


@final
class Reader:
    """Loads the batches of one worker in order.

    Args:
        worker: number of the worker.
        registers: how many batches may be in use, waiting, or being loaded at one time; at least 1.
    """

    def __init__(self, worker: int, registers: int) -> None:
        self._worker, self._registers = worker, registers
        self._requested: list[float] = []  # when each batch was first requested
        #: every load, in order
        self.loads: list[Load] = []

    def request(self, batch: int, seconds: float, now: float) -> float:
        """Request a micro-batch, when the worker is done with those before; return when it is available.

        Args:
            batch: number of its batch; the batch of the last request is available at once.
            seconds: seconds that this batch takes to load.
            now: current time, not before that of the last call.
        """
        if self.loads and self.loads[-1].batch == batch:
            return now
        self._requested.append(now)
        freed = self._requested[max(0, len(self._requested) - self._registers)]
        start = max(freed, self.loads[-1].end_s) if self.loads else freed
        self.loads.append(Load(self._worker, batch, start, start + seconds))
        return max(now, start + seconds)

    @property
    def peak(self) -> int:
        """Most registers in use at one time."""
        changes = [(load.start_s, 1) for load in self.loads] + [(freed, -1) for freed in self._requested[1:]]
        return max(accumulate(change for _, change in sorted(changes)), default=0)
