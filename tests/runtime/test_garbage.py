"""The garbage of runs that are over goes, though what a run finds is left out of collections."""

from __future__ import annotations

import gc
import weakref

from roundelay.runtime.garbage import EVERY, GROWTH, settled


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self
        self.held = [[] for _ in range(1000)]  # type: ignore[var-annotated]  # objects that the collector counts


def test_a_run_leaves_out_what_is_there_and_puts_it_back() -> None:
    before = gc.get_freeze_count()
    with settled():
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0


def test_the_garbage_of_many_runs_is_collected() -> None:
    for _ in range(EVERY):
        with settled():
            objects = gc.get_freeze_count()
    runs = 2 * EVERY + int((GROWTH**2 - 1) * objects / 1000)  # twice as many as are worth a whole collection
    left = []
    for _ in range(runs):
        with settled():
            left.append(weakref.ref(Node()))
    assert sum(one() is not None for one in left) < 0.7 * runs
