"""Stages on workers in another order than their numbers: the same bits, over every transport and after a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from roundelay.checkpoint.checkpoint import load
from roundelay.ir.plan import Plan
from roundelay.session.training import Length, Saving
from tests.equivalence.cells import VARIANTS, bench
from tests.resume.cuts import Trip, differences, every_checkpoint


def permuted(plan: Plan, order: Sequence[int]) -> Plan:
    """The plan with the stages of worker k on worker ``order[k]``, as a person would edit it."""
    names = [worker.name for worker in plan.workers]
    moved = {name: names[k] for name, k in zip(names, order, strict=True)}
    stages = tuple(replace(stage, workers=tuple(moved[n] for n in stage.workers)) for stage in plan.stages)
    return Plan.parse(replace(plan, stages=stages).text())


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
@pytest.mark.parametrize(
    ("variant", "stages", "order"),
    [("pipeoptim improved mixed", 3, (2, 0, 1)), ("1f1b", 3, (1, 2, 0)), ("zb-v", 4, (1, 0))],
)
def test_a_hand_edited_placement_runs_and_verifies(
    variant: str, stages: int, order: Sequence[int], transport: str
) -> None:
    place = bench("batchnorm")
    plan = permuted(place.plan(VARIANTS[variant], stages, 3, transport), order)
    assert tuple(map(plan.worker_of, range(plan.num_stages))) != tuple(range(stages))
    found = place.verify(plan)
    assert found.equal, found.difference
    assert sorted(found.workers) == list(range(len(order)))


def test_it_goes_on_in_mid_flight_with_the_stages_on_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bench("batchnorm")
    usual = place.plan(VARIANTS["pipeoptim improved mixed"], 3, 1)
    trip = Trip(place.job, place.captured, permuted(usual, (1, 2, 0)), Length(steps=8), place.restore)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "4")
    assert start.flight is not None
    for plan in (trip.plan, usual, permuted(usual, (2, 1, 0))):
        assert differences(whole, replace(trip, plan=plan).rest(start), start) == []
