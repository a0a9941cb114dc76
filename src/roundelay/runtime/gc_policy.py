"""What Python's garbage collector is spared while a task runs."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

EVERY = 4
"""In so many runs it is looked whether a whole collection is due: to count objects takes ten milliseconds."""
GROWTH = 1.25
"""Python's own measure: one is due when a quarter has come on top of what the last one left."""


@dataclass(slots=True)
class _Past:
    """What this process has seen: its runs, and the objects behind the last whole collection."""

    runs: int = 0
    objects: int = 0


_PAST = _Past()


@contextmanager
def settled() -> Generator[None, None, None]:
    """Leave what is here already out of collections: torch's own objects cost 0.1 ms per micro-batch and worker.

    Processes that are forked meanwhile inherit it. To freeze objects also sets back the counts by which Python finds
    that a whole collection is due, so in a process of many runs, as in a comparison, none would come any more; when
    one is due, it is made here, before the run.
    """
    gc.freeze()
    if _PAST.runs % EVERY == EVERY - 1:
        _collect_if_due()
    _PAST.runs += 1
    try:
        yield
    finally:
        gc.unfreeze()


def _collect_if_due() -> None:
    """With everything frozen, before and behind."""
    if _PAST.objects and gc.get_freeze_count() <= GROWTH * _PAST.objects:
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _PAST.objects = gc.get_freeze_count()
