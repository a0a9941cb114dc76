"""The loader before a run: its first batch, and how long it takes.

It is asked by a reader's thread, as in a run, so that no wait is endless.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from roundelay.errors import DeadlineError, JobError, RoundelayError
from roundelay.frontend.batch import num_rows, split, split_rows
from roundelay.job import Batches
from roundelay.runtime.ahead import Registers, Tell, ahead, silent
from roundelay.runtime.reader import Extent, Generators, copied, read_batches, user_code

DEADLINE_S = 300.0
"""Seconds that a batch, or any message, is waited for if nothing else is said."""

MEASURED, BUDGET_S = 8, 0.5
"""Batches that the loader's time is measured by, behind the first; and the seconds after which none is begun."""


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
        JobError: there is none, or the loader can be read only once.
    """
    with closing(ahead(_anew(batches, seed), Registers(1, deadline_s, tell=tell))) as source:
        return next(source)


def _anew(batches: Batches, seed: int) -> Generator[Any, None, None]:
    """The first epoch of a loader that can be read again."""
    with user_code("batches(0)"), Generators().active():
        once = batches(0)
        if hasattr(once, "__next__") and batches(0) is once:
            raise JobError(
                "batches(0)",
                got=f"the same {type(once).__name__} at every call, which can be read only once",
                expected="an iterable that starts anew: capturing, planning and training each read the first batch",
                remedy="Make the generator inside of batches, or return a list or a DataLoader.",
            )
    yield from read_batches(batches, seed, Extent(epochs=1))


def reading_s(
    batches: Batches,
    seed: int,
    micro_batches: int,
    deadline_s: float = DEADLINE_S,
    tell: Tell = silent,
    look: Callable[[Any], None] = lambda micro_batch: None,
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

    Raises:
        DeadlineError: a batch did not come in time.
    """
    seen: list[Any] = []
    spent, parts = 0.0, 0
    registers = Registers(1, deadline_s, tell=tell)
    try:
        with closing(ahead(_few(batches, seed), registers)) as source:
            next(source)
            for batch in source:
                parts += len(split_rows(num_rows(batch), micro_batches))
                seen.append(batch)
                _, start, end = registers.loads[-1]
                spent += end - start
                if spent > BUDGET_S:
                    break
    except DeadlineError:
        raise
    except RoundelayError:
        pass
    for batch in seen:
        for part in split(batch, micro_batches):
            look(part)
    return spent / parts if parts else 0.0


def _few(batches: Batches, seed: int) -> Generator[Any, None, None]:
    """Batches to measure by, copied as in a run."""
    yield from map(copied, read_batches(batches, seed, Extent(epochs=1, batches=1 + MEASURED)))
