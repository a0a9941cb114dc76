"""The loader before a run: its first batch, and how long it takes.

It is asked by a reader's thread, as in a run, so that no wait is endless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

from roundelay.errors import DeadlineError, RoundelayError
from roundelay.frontend.batch import part_rows, split
from roundelay.job import Batches, Peekable
from roundelay.runtime.loader_epoch import Generators, OpenEpoch, forget, looked_at, peeked
from roundelay.runtime.prefetch import Registers, Tell, prefetch, silent

DEADLINE_S = 300.0
"""Seconds that a batch, or any message, is waited for if nothing else is said."""

MEASURED, BUDGET_S = 8, 0.5
"""Batches that the loader's time is measured by, behind the first; and the seconds after which none is begun."""


HELD_BYTES = 64 << 20
"""Bytes of batches that are kept for the run, beside the first two, until no further one is looked at."""


def first_batch(batches: Batches, seed: int, deadline_s: float = DEADLINE_S, tell: Tell = silent) -> Any:
    """The first batch of the first epoch, as a run with this seed will see it.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        deadline_s: seconds that it is waited for.
        tell: told of a long wait.

    Raises:
        DeadlineError: it did not come in time.
        UserCodeError: the loader raises.
        JobError: there is none.
    """
    with (
        _forgotten_if_late(batches),
        closing(prefetch(_looking(batches, seed, 1), _registers(deadline_s, tell))) as source,
    ):
        return next(source)[0]


def first_batches(
    batches: Batches, seed: int, count: int, deadline_s: float = DEADLINE_S, *, budget_s: float = math.inf
) -> list[Any]:
    """The first batches of the first epoch, as a run with this seed will see them, without using them up.

    There may be fewer: the epoch ends, the loader raises (which is told when a run comes so far), or they are large.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        count: how many at most.
        deadline_s: seconds that each is waited for.
        budget_s: seconds of reading behind the first after which no further one is asked for.

    Raises:
        DeadlineError: one did not come in time.
    """
    found: list[Any] = []
    try:
        looking = _looking(batches, seed, count)
        with _forgotten_if_late(batches), closing(prefetch(looking, _registers(deadline_s, silent))) as source:
            spent = 0.0
            for batch, seconds in source:
                spent += seconds if found else 0.0
                found.append(batch)
                if spent > budget_s:
                    break
    except DeadlineError:
        raise
    except RoundelayError:
        pass
    return found


def of_second_epoch(batches: Batches, seed: int, deadline_s: float = DEADLINE_S) -> Any:
    """The first batch of the second epoch; None if there is none to be had, which is told when a run comes so far.

    What was looked at of the first epoch is opened anew by the run: only for who reads the data twice anyway.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        deadline_s: seconds that it is waited for.
    """

    def looking() -> Generator[Any, None, None]:
        opened = OpenEpoch(batches, seed, 1, Generators())
        try:
            yield opened.look(0)
        finally:
            opened.close()

    try:
        with closing(prefetch(looking(), _registers(deadline_s, silent))) as source:
            found = next(source)
    except RoundelayError:
        return None
    forget(batches)
    return found


@contextmanager
def _forgotten_if_late(batches: Batches) -> Iterator[None]:
    """A loader that hangs is in the hands of a thread that was given up."""
    try:
        yield
    except DeadlineError:
        if isinstance(batches, Peekable):
            batches.opened = None
        raise


def _registers(deadline_s: float, tell: Tell) -> Registers:
    return Registers(1, deadline_s, tell=tell)


def _looking(batches: Batches, seed: int, count: int) -> Generator[tuple[Any, float], None, None]:
    """The first batches of the first epoch, not used up, and the seconds that each took when it was first read."""
    opened = peeked(batches, seed)
    try:
        for number in range(count):
            batch = opened.look(number)
            if batch is None or (number > 1 and opened.held_bytes > HELD_BYTES):
                return
            yield batch, opened.seconds[number]
    finally:
        looked_at(opened)


def reading_s(
    batches: Batches,
    seed: int,
    micro_batches: int,
    deadline_s: float = DEADLINE_S,
    tell: Tell = silent,
    look: Callable[[Any], None] = lambda micro_batch: None,
    *,
    min_rows: int = 1,
) -> float:
    """Seconds in which the loader gives a micro-batch, as a mean over a few batches of the first epoch.

    The first batch is left out: it starts what the loader starts. 0 where there is no second, or where the loader
    fails at it, which is told when a run comes so far.

    Args:
        batches: the job's loader, left where the measurement ends.
        seed: the run's seed.
        micro_batches: M.
        deadline_s: seconds that a batch is waited for.
        tell: told of long waits.
        look: shown every micro-batch that is measured by; whatever it raises is raised.
        min_rows: of a micro-batch, as the graph says.

    Raises:
        DeadlineError: a batch did not come in time.
    """
    seen: list[Any] = []
    spent, parts = 0.0, 0
    try:
        looking = _looking(batches, seed, 1 + MEASURED)
        with _forgotten_if_late(batches), closing(prefetch(looking, _registers(deadline_s, tell))) as source:
            next(source)
            for batch, seconds in source:
                parts += len(part_rows(batch, micro_batches, min_rows))
                seen.append(batch)
                spent += seconds
                if spent > BUDGET_S:
                    break
    except DeadlineError:
        raise
    except RoundelayError:
        pass
    for batch in seen:
        for part in split(batch, micro_batches, min_rows):
            look(part)
    return spent / parts if parts else 0.0
