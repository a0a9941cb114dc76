"""The most recent instructions of a worker; older ones are dropped, so that a run of days does not fill the memory."""

from __future__ import annotations

from collections import deque
from typing import final

from roundelay.actor.machine import Run

KEPT_MICRO_BATCHES = 2**13
"""Number of micro-batches whose instructions are kept at most; about 4 MiB per worker."""

KEPT_INSTRUCTIONS = 2**17
"""Number of instructions that are kept at most."""

LogEntry = tuple[Run, int, float, float, int]
"""An executed instruction: itself, its batch, start and end in seconds of ``time.perf_counter``, bytes sent."""


def kept_micro_batches(lines: int) -> int:
    """Of how many micro-batches the instructions are kept, where the longest program has so many lines."""
    return max(1, min(KEPT_MICRO_BATCHES, KEPT_INSTRUCTIONS // lines))


@final
class InstructionLog:
    """The instructions of the last micro-batches, in order.

    All workers end with the same micro-batch, so their logs cover the same part of the run: from ``first`` on.

    Args:
        kept: number of micro-batches to keep.
    """

    def __init__(self, kept: int = KEPT_MICRO_BATCHES) -> None:
        self._kept = kept
        self.events: deque[LogEntry] = deque()
        self.first = 0
        self.dropped = 0

    def add(self, event: LogEntry) -> None:
        """Append an instruction and drop those of older micro-batches.

        A few that are older than ``first`` remain, as instructions are not in the order of micro-batches.
        """
        self.events.append(event)
        self.first = max(self.first, event[0].g + 1 - self._kept)
        while self.events and self.events[0][0].g < self.first:
            self.events.popleft()
            self.dropped += 1
