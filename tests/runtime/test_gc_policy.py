"""The garbage of runs that are over goes, though what a run finds is left out of collections."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import roundelay
from roundelay.launching import gc_policy
from roundelay.launching.gc_policy import EVERY, frozen_gc
from roundelay.session import training
from roundelay.session.run_record import RunRecord
from tests.api.jobs import make


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self
        self.held = [[] for _ in range(1000)]  # type: ignore[var-annotated]  # objects that the collector counts


def test_a_run_leaves_out_what_is_there_and_puts_it_back() -> None:
    before = gc.get_freeze_count()
    with frozen_gc():
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0


def test_the_garbage_of_many_runs_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    growth = 1.02  # with the real one, thousands of runs where other tests have left millions of objects
    monkeypatch.setattr(gc_policy, "GROWTH", growth)
    for _ in range(EVERY):
        with frozen_gc():
            objects = gc.get_freeze_count()
    runs = 2 * EVERY + int((growth**2 - 1) * objects / 1000)  # twice as many as are worth a whole collection
    left = []
    for _ in range(runs):
        with frozen_gc():
            left.append(weakref.ref(Node()))
    assert sum(one() is not None for one in left) < 0.7 * runs


def test_what_a_run_has_told_goes_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[RunRecord]] = []

    def record(*given: Any) -> RunRecord:
        one = RunRecord(*given)
        made.append(weakref.ref(one))
        return one

    monkeypatch.setattr(training, "RunRecord", record)
    gc.disable()
    try:
        job = make()
        roundelay.train(job, plan=roundelay.plan(job, workers=2, transport="memory"), steps=2)
        assert len(made) == 1
        assert made[0]() is None
    finally:
        gc.enable()
