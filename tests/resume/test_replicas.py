"""Checkpoints of replicas: each has buffers and flights of its own, and what they have in common is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from roundelay.checkpoint.checkpoint import load
from roundelay.session.events import Drained, Event
from roundelay.session.training import Length, Saving
from tests.equivalence.cells import VARIANTS, bench
from tests.resume.cuts import Trip, differences, every_checkpoint

STEPS = 8


def trip_of(name: str, replicas: int, model: str = "batchnorm", stages: int = 2) -> Trip:
    place = bench(model)
    plan = place.replicated(place.plan(VARIANTS[name], stages, 2), replicas)
    return Trip(place.job, place.captured, plan, Length(steps=STEPS), place.restore)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("pipeoptim improved mixed", "batchnorm"),
        ("pipedream", "batchnorm"),
        ("1f1b", "batchnorm"),
        ("cdp-v2", "mlp"),
        ("rehearse mixed", "mlp"),
    ],
)
def test_a_run_goes_on_from_every_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: str
) -> None:
    trip = trip_of(name, 2, model)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    for updates in range(1, STEPS):
        start = load(tmp_path / str(updates))
        told: list[Event] = []
        assert differences(whole, trip.rest(start, told), start) == []
        assert not [event for event in told if isinstance(event, Drained)]


def test_each_replica_goes_on_with_its_own_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trip = trip_of("1f1b", 3)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "4")
    assert len(start.replica_buffers) == 2
    assert not all(torch.equal(start.replica_buffers[0][n], b) for n, b in start.buffers.items()), (
        "it has rows of its own"
    )
    ended = trip.rest(start).snapshot.replica_buffers
    assert same(ended, whole.snapshot.replica_buffers)
    assert not same(trip.rest(replace(start, replica_buffers=())).snapshot.replica_buffers, ended)


def same(one: Sequence[dict[str, torch.Tensor]], other: Sequence[dict[str, torch.Tensor]]) -> bool:
    """Whether all replicas have the same buffers in both."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(own[name], buffer) for own, wanted in pairs for name, buffer in wanted.items())


def test_parameters_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for replicas in (1, 3):
        folder = tmp_path / str(replicas)
        trip_of("1f1b", replicas, "mlp", 1).whole(Saving(path=folder))
        sizes.append(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    assert sizes[1] < sizes[0] + 4096


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("name", ["pipeoptim improved mixed", "1f1b"])
def test_another_number_of_replicas_starts_with_empty_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, before: int, after: int
) -> None:
    with every_checkpoint(monkeypatch, tmp_path):
        trip_of(name, before).whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "3")
    told: list[Event] = []
    done = trip_of(name, after).rest(start, told)
    assert [update.update for update in done.updates] == list(range(3, STEPS))
    assert min(done.micro_losses) >= start.position.micro_batches, "no random number is used twice"
    drained = [event for event in told if isinstance(event, Drained)]
    assert all(f"replicas from {before} to {after}" in event.reason for event in drained)
    assert bool(drained) == (name != "1f1b")
