"""Reads the first batches of a loader before a run, and measures its time.

A reader thread reads them, as in a run, so that every wait has a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

from roundelay.errors import DeadlineError, JobError, RoundelayError
from roundelay.frontend.batch import split
from roundelay.job import Batches, Peekable
from roundelay.runtime.loading.loader_epoch import Generators, OpenEpoch, finish_peeking, forget, open_first_epoch
from roundelay.runtime.loading.prefetch import OnWait, Registers, ignore_wait, prefetch

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
    with _peeking(batches, seed, 1, deadline_s, on_wait) as source:
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
    return [batch for batch, _ in _timed(batches, seed, count, deadline_s, ignore_wait, budget_s)]


def _timed(
    batches: Batches, seed: int, count: int, deadline_s: float, on_wait: OnWait, budget_s: float
) -> list[tuple[Any, float]]:
    """As :func:`first_batches`, each with the seconds that the loader took for it."""
    read: list[tuple[Any, float]] = []
    try:
        with _peeking(batches, seed, count, deadline_s, on_wait) as source:
            for batch, seconds in source:
                read.append((batch, seconds))
                if sum(seconds for _, seconds in read[1:]) > budget_s:
                    break
    except DeadlineError:
        raise
    except RoundelayError:
        pass
    return read


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
        with closing(prefetch(peeking(), Registers(1, deadline_s))) as source:
            batch = next(source)
    except RoundelayError:
        return None
    forget(batches)
    return batch


@contextmanager
def _peeking(
    batches: Batches, seed: int, count: int, deadline_s: float, on_wait: OnWait
) -> Iterator[Iterator[tuple[Any, float]]]:
    """The first batches of the first epoch without consuming them, and the seconds that the loader took."""
    try:
        with closing(prefetch(_peeked(batches, seed, count), Registers(1, deadline_s, on_wait=on_wait))) as source:
            yield source
    except DeadlineError:  # drop an epoch whose loader hangs in an abandoned thread
        if isinstance(batches, Peekable):
            batches.opened = None
        raise


def _peeked(batches: Batches, seed: int, count: int) -> Generator[tuple[Any, float], None, None]:
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
    spent, parts = 0.0, 0
    for batch, seconds in _timed(batches, seed, 1 + MEASURED, deadline_s, on_wait, BUDGET_S)[1:]:
        try:
            cut = split(batch, micro_batches, min_rows)
        except JobError:
            break
        spent += seconds
        parts += len(cut)
        for part in cut:
            look(part)
    return spent / parts if parts else 0.0
