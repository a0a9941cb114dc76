"""Keeps Python's garbage collector from scanning long-lived objects while a task runs."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

EVERY = 4
"""Runs between two checks whether a full collection is due: counting objects takes ten milliseconds."""
GROWTH = 1.25
"""A full collection is due when there are a quarter more objects than after the last one; Python's own criterion."""


@dataclass(slots=True)
class _Past:
    """Number of runs of this process, and number of objects after the last full collection."""

    runs: int = 0
    objects: int = 0


_PAST = _Past()


@contextmanager
def frozen_gc() -> Generator[None, None, None]:
    """Exclude existing objects from collections: scanning torch's own costs 0.1 ms per micro-batch and worker.

    Processes forked meanwhile inherit this. Freezing also resets the counters by which Python decides on a full
    collection, so that a process with many runs, such as a comparison, would never have one; if one is due, it is made
    here, before the run.
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
    """Run a full collection if there are many new objects; all objects are frozen before and after."""
    if _PAST.objects and gc.get_freeze_count() <= GROWTH * _PAST.objects:
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _PAST.objects = gc.get_freeze_count()
