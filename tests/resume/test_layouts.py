"""Checkpoints of cyclic layouts: a run goes on from each of them, in every form, as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roundelay.checkpoint.checkpoint import load
from roundelay.cli.train_progress import _message
from roundelay.ir.clip import Clip
from roundelay.session.events import Drained, Event
from roundelay.session.training import Length, Saving
from tests.equivalence.cells import bench
from tests.resume.cuts import Trip, differences, every_checkpoint

STEPS = 8


def trip_of(layout: str, rule: str, model: str, clip: str = "none") -> Trip:
    place = bench(model)
    plan = replace(place.in_layout(layout, rule, 3, 3), clip=Clip.parse(clip))
    return Trip(place.job, place.captured, plan, Length(steps=STEPS), place.restore)


@pytest.mark.parametrize("model", ["batchnorm", "mlp"])
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("layout", ["single", "dp", "mp", "zero"])
def test_a_run_goes_on_from_every_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, rule: str, model: str
) -> None:
    goes_on(trip_of(layout, rule, model), tmp_path, monkeypatch)


def test_updates_that_wait_for_all_gradients_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on(trip_of("dp", "cdp-v1", "batchnorm", "global:0.05"), tmp_path, monkeypatch)


def goes_on(trip: Trip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on from every checkpoint of a run."""
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    for updates in range(1, STEPS):
        start = load(tmp_path / str(updates))
        told: list[Event] = []
        assert differences(whole, trip.rest(start, told), start) == []
        assert not [event for event in told if isinstance(event, Drained)]


def test_weights_that_another_layout_cannot_read_are_dropped_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with every_checkpoint(monkeypatch, tmp_path):
        trip_of("dp", "cdp-v1", "mlp").whole(Saving(path=tmp_path, every=1))
    told: list[Event] = []
    trip_of("single", "cdp-v1", "mlp").rest(load(tmp_path / "3"), told)
    (drained,) = [event for event in told if isinstance(event, Drained)]
    assert drained.micro_batches == 0
    assert "layout from dp to single" in drained.reason
    assert "read the checkpoint's weights" in _message(drained)
