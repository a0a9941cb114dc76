"""Reads the first batches of a loader before a run, and measures its time.

A reader thread reads them, as in a run, so that every wait has a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

from roundelay.errors import DeadlineError, RoundelayError
from roundelay.frontend.batch import part_rows, split
from roundelay.job import Batches, Peekable
from roundelay.runtime.loader_epoch import Generators, OpenEpoch, finish_peeking, forget, open_first_epoch
from roundelay.runtime.prefetch import OnWait, Registers, ignore_wait, prefetch

DEADLINE_S = 300.0
"""Default seconds to wait for a batch or a message."""

MEASURED, BUDGET_S = 8, 0.5
"""Batches after the first by which the loader's time is measured, and seconds after which no further one is read."""

HELD_BYTES = 64 << 20
"""Bytes of peeked batches after which no further one is read; the first two are read in any case."""


def first_batch(batches: Batches, seed: int, deadline_s: float = DEADLINE_S, on_wait: OnWait = ignore_wait) -> Any:
    """Return the first batch of the first epoch, as a run with this seed will get it.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        deadline_s: seconds to wait.
        on_wait: called during a long wait.

    Raises:
        DeadlineError: it did not come in time.
        UserCodeError: the loader raises.
        JobError: there is none.
    """
    with (
        _closed_on_timeout(batches),
        closing(prefetch(_peeking(batches, seed, 1), _registers(deadline_s, on_wait))) as source,
    ):
        return next(source)[0]


def first_batches(
    batches: Batches, seed: int, count: int, deadline_s: float = DEADLINE_S, *, budget_s: float = math.inf
) -> list[Any]:
    """Return the first batches of the first epoch, as a run with this seed will get them, without consuming them.

    There may be fewer: the epoch ends, the loader raises (which a run reports when it gets there), or they are large.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        count: how many at most.
        deadline_s: seconds to wait for each.
        budget_s: seconds of reading, not counting the first, after which no further one is read.

    Raises:
        DeadlineError: one did not come in time.
    """
    result: list[Any] = []
    try:
        peeking = _peeking(batches, seed, count)
        with _closed_on_timeout(batches), closing(prefetch(peeking, _registers(deadline_s, ignore_wait))) as source:
            spent = 0.0
            for batch, seconds in source:
                spent += seconds if result else 0.0
                result.append(batch)
                if spent > budget_s:
                    break
    except DeadlineError:
        raise
    except RoundelayError:
        pass
    return result


def second_epoch_batch(batches: Batches, seed: int, deadline_s: float = DEADLINE_S) -> Any:
    """Return the first batch of the second epoch; None if the loader fails, which a run reports when it gets there.

    The run will reopen the first epoch, so use this only where the data can be read twice.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        deadline_s: seconds to wait.
    """

    def peeking() -> Generator[Any, None, None]:
        opened = OpenEpoch(batches, seed, 1, Generators())
        try:
            yield opened.peek(0)
        finally:
            opened.close()

    try:
        with closing(prefetch(peeking(), _registers(deadline_s, ignore_wait))) as source:
            batch = next(source)
    except RoundelayError:
        return None
    forget(batches)
    return batch


@contextmanager
def _closed_on_timeout(batches: Batches) -> Iterator[None]:
    """Drop an epoch whose loader hangs in an abandoned thread."""
    try:
        yield
    except DeadlineError:
        if isinstance(batches, Peekable):
            batches.opened = None
        raise


def _registers(deadline_s: float, on_wait: OnWait) -> Registers:
    return Registers(1, deadline_s, on_wait=on_wait)


def _peeking(batches: Batches, seed: int, count: int) -> Generator[tuple[Any, float], None, None]:
    """Yield the first batches of the first epoch without consuming them, and the seconds that the loader took."""
    opened = open_first_epoch(batches, seed)
    try:
        for number in range(count):
            batch = opened.peek(number)
            if batch is None or (number > 1 and opened.peeked_bytes > HELD_BYTES):
                return
            yield batch, opened.seconds[number]
    finally:
        finish_peeking(opened)


def reading_s(
    batches: Batches,
    seed: int,
    micro_batches: int,
    deadline_s: float = DEADLINE_S,
    on_wait: OnWait = ignore_wait,
    look: Callable[[Any], None] = lambda micro_batch: None,
    *,
    min_rows: int = 1,
) -> float:
    """Measure the loader's seconds per micro-batch, as a mean over a few batches of the first epoch.

    The first batch is left out, as it includes the loader's start. 0 where there is no second batch, or where the
    loader fails at it, which a run reports when it gets there.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        micro_batches: M.
        deadline_s: seconds to wait for a batch.
        on_wait: called during long waits.
        look: called with every measured micro-batch; its errors are raised.
        min_rows: minimum rows of a micro-batch, from the graph.

    Raises:
        DeadlineError: a batch did not come in time.
    """
    measured: list[Any] = []
    spent, parts = 0.0, 0
    try:
        peeking = _peeking(batches, seed, 1 + MEASURED)
        with _closed_on_timeout(batches), closing(prefetch(peeking, _registers(deadline_s, on_wait))) as source:
            next(source)
            for batch, seconds in source:
                parts += len(part_rows(batch, micro_batches, min_rows))
                measured.append(batch)
                spent += seconds
                if spent > BUDGET_S:
                    break
    except DeadlineError:
        raise
    except RoundelayError:
        pass
    for batch in measured:
        for part in split(batch, micro_batches, min_rows):
            look(part)
    return spent / parts if parts else 0.0
