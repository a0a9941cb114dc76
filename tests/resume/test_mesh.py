"""Checkpoints of a mesh: each worker writes its parts of what is split, and any other mesh reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundelay.checkpoint.checkpoint import load
from roundelay.session.events import Drained, Event
from roundelay.session.training import Length, Saving, Trained
from tests.equivalence.cells import VARIANTS, bench
from tests.resume.cuts import Trip, differences, every_checkpoint

STEPS = 6


def trip_of(
    name: str, parts: int, model: str = "gpt2", stages: int = 2, replicas: int = 1, transport: str = "memory"
) -> Trip:
    """A run on a mesh; without one where it has one part."""
    place = bench(model)
    if parts > 1:
        plan = place.on_mesh(name, stages, 2, parts, replicas, transport)
    else:
        plan = place.plan(VARIANTS[name], stages, 2)
    return Trip(place.job, place.captured, plan, Length(steps=STEPS), place.restore)


@pytest.mark.parametrize(
    ("name", "model", "parts"),
    [
        ("1f1b", "gpt2", 2),
        ("pipedream", "skip", 3),
        ("pipeoptim improved mixed", "bert_classifier", 2),
        ("cdp-v2", "llama", 2),
        ("zb-h1", "dropout_heavy", 3),
    ],
)
def test_a_run_goes_on_from_every_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: str, parts: int
) -> None:
    trip = trip_of(name, parts, model)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    for updates in range(1, STEPS):
        start = load(tmp_path / str(updates))
        told: list[Event] = []
        assert differences(whole, trip.rest(start, told), start) == []
        assert not [event for event in told if isinstance(event, Drained)]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_processes_and_replicas_of_a_mesh_go_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    trip = trip_of("pipeoptim improved mixed", 2, stages=1, replicas=2, transport=transport)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "3")
    assert differences(whole, trip.rest(start), start) == []


def test_what_is_split_is_stored_once(tmp_path: Path) -> None:
    sizes = []
    for parts in (1, 3):
        folder = tmp_path / str(parts)
        trip_of("1f1b", parts, stages=1).whole(Saving(path=folder))
        sizes.append(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_another_mesh_reads_the_same_weights_and_optimizer_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """Between flushes nothing is in flight, so only the last bits of what is added up differ afterwards."""
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip_of("1f1b", before).whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "3")
    done = trip_of("1f1b", after).rest(start)
    assert [update.update for update in done.updates] == list(range(3, STEPS))
    assert far(whole, done) < 1e-4
    for name, weight in whole.snapshot.parameters.items():
        assert done.snapshot.parameters[name].shape == weight.shape


def far(one: Trained, other: Trained) -> float:
    """The largest relative distance of a parameter."""
    pairs = ((one.snapshot.parameters[n], w) for n, w in other.snapshot.parameters.items())
    return max(float((mine - its).norm() / torch.clamp(mine.norm(), min=1e-3)) for mine, its in pairs)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_another_mesh_starts_with_empty_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    name = "pipeoptim improved mixed"
    with every_checkpoint(monkeypatch, tmp_path):
        trip_of(name, before).whole(Saving(path=tmp_path, every=1))
    told: list[Event] = []
    trip_of(name, after).rest(load(tmp_path / "3"), told)
    (drained,) = [event for event in told if isinstance(event, Drained)]
    assert f"workers from {2 * before} to {2 * after}" in drained.reason
