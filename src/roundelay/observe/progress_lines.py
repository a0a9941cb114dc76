"""Progress as lines of text, for a log file, a notebook or a script; and how many updates a run has, if known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

FIRST_S, EVERY_S = 2.0, 10.0
"""Seconds until the first line, and between lines."""


@final
class RunLength:
    """How many updates a run has.

    Args:
        before: updates of earlier runs that it continues.
        updates: of the run itself, if it is given by updates.
        epochs: of the run itself, else.
        per_epoch: batches of an epoch, if the loader says so; else the first epoch shows it.
        skipped: batches of the first epoch that an earlier run has read.
    """

    def __init__(
        self, before: int, updates: int | None, epochs: int | None, per_epoch: int | None, skipped: int = 0
    ) -> None:
        #: updates of earlier runs
        self.before = before
        self._updates, self._epochs, self._per_epoch, self._skipped = updates, epochs, per_epoch, skipped
        self._epoch: int | None = None
        self._seen = 0

    def see(self, epoch: int) -> None:
        """Note an update and its epoch."""
        if self._epoch is not None and epoch != self._epoch and self._per_epoch is None:
            self._per_epoch = self._seen + self._skipped
        self._seen += 1
        self._epoch = epoch

    @property
    def total(self) -> int | None:
        """The number of updates, those of earlier runs included; None if it is not known yet."""
        if self._updates is not None:
            return self.before + self._updates
        if self._epochs is None or self._per_epoch is None:
            return None
        return self.before + self._epochs * self._per_epoch - self._skipped


@final
class ProgressLines:
    """Prints a line after two seconds, and then one every ten.

    Args:
        length: of the run.
        show: prints a line.
        clock: seconds.
    """

    def __init__(
        self, length: RunLength, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._length, self._show, self._clock = length, show, clock
        self._begin = clock()
        self._next = self._begin + FIRST_S
        self._first: tuple[float, int] | None = None

    def update(self, update: int, loss: float, metrics: Mapping[str, float], rate: float) -> None:
        """Note an update of the run, numbered from 0, and print a line if one is due."""
        now = self._clock()
        self._first = self._first or (now, update)
        if now < self._next:
            return
        self._next = now + EVERY_S
        total, done = self._length.total, update + 1
        of = f"/{total}" if total is not None else ""
        metrics_text = "".join(f"  {name} {value:.4f}" for name, value in metrics.items())
        self._show(f"update {done}{of}  loss {loss:.4f}{metrics_text}  {rate:.0f} samples/s{self._left(now, done)}")

    def evaluated(self, updates: int, metrics: Mapping[str, float]) -> None:
        """Print an evaluation, where progress is printed at all: in a run of some seconds."""
        if self._clock() - self._begin >= FIRST_S:
            self._show(
                f"after update {updates}: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            )

    def _left(self, now: float, done: int) -> str:
        total = self._length.total
        assert self._first is not None
        began, first = self._first
        if total is None or done <= first + 1:
            return ""
        seconds = (now - began) / (done - first - 1) * max(0, total - done)
        return f"  {duration(seconds)} left"


def duration(seconds: float) -> str:
    """``8 s``, ``3:20 min``, ``2:05 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
