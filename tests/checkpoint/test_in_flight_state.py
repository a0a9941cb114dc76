"""What is in flight survives a checkpoint's files, bit for bit, each memory once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from roundelay.checkpoint.checkpoint import Checkpoint, Position, Until, load
from roundelay.checkpoint.in_flight_state import ANY, InFlight, StageInFlight, decode, encode
from roundelay.errors import CheckpointError
from roundelay.weight_prediction import LastStep
from tests.checkpoint.whole import save


def stage() -> StageInFlight:
    """One of everything; a weight that two versions share, and one that is a scalar."""
    frozen, scalar = torch.randn(3), torch.tensor(2.5, dtype=torch.float64)
    return StageInFlight(
        versions={7: 3, 8: 4},
        weights={
            (3, 0, ANY): {"a": torch.randn(2, 3), "b": frozen},
            (4, 2, 8): {"a": torch.randn(2, 3).t(), "b": frozen},
        },
        keep=3,
        last={"a": LastStep(0.1, scalar, None), "b": LastStep(1e-300, None, torch.randn(0, 2))},
        norms={7: None, 8: 0.1},
        newest=1e-300,
        scales={7: 2.0**-24, 8: 65536.0},
    )


def checkpoint(flight: InFlight | None) -> Checkpoint:
    """A small one."""
    position = Position(updates=5, micro_batches=7, epoch=1, batches_into_epoch=0)
    weights = {"a": torch.randn(2, 3)}
    return Checkpoint(weights, {}, {}, position, 0, "print", "mine", 2, flight, Until(updates=9), (2.0**-24, 7))


def assert_same(a: StageInFlight, b: StageInFlight) -> None:
    """Assert equal bits."""
    for one, other in (
        (a.versions, b.versions),
        (a.keep, b.keep),
        (a.weights.keys(), b.weights.keys()),
        (a.last.keys(), b.last.keys()),
        (a.norms, b.norms),
        (a.newest, b.newest),
        (a.scales, b.scales),
    ):
        assert one == other
    pairs = [(a.weights[key][name], b.weights[key][name]) for key in a.weights for name in a.weights[key]]
    for name, last in a.last.items():
        assert last.rate == b.last[name].rate
        pairs += [(last.displacement, b.last[name].displacement), (last.gradient, b.last[name].gradient)]
    for mine, other in pairs:
        assert (mine is None) == (other is None)
        assert mine is None or (mine.dtype == other.dtype and torch.equal(mine, other))


def test_it_comes_back_and_a_memory_that_two_share_is_stored_once() -> None:
    flight = stage()
    table, tensors = encode(flight, "stage 0 ")
    assert len(tensors) == 5
    assert_same(decode(json.loads(json.dumps(table)), tensors), flight)


def test_it_survives_a_checkpoint_and_goes_with_the_next_that_has_none(tmp_path: Path) -> None:
    flight = InFlight({"rule": "mine"}, 2, {(0, 0): stage(), (1, 0): stage()})
    save(tmp_path / "c", checkpoint(flight), {})
    found = load(tmp_path / "c")
    assert found.flight is not None
    assert (found.flight.order, found.flight.since, found.flight.micro_batches) == ({"rule": "mine"}, 2, 2)
    assert found.until == Until(updates=9)
    assert found.loss_scale == (2.0**-24, 7)
    for mine, other in zip(flight.stages.values(), found.flight.stages.values(), strict=True):
        assert_same(mine, other)
    save(tmp_path / "c", checkpoint(None), {})
    assert load(tmp_path / "c").flight is None


def test_it_is_refused_where_it_is_damaged_or_gone(tmp_path: Path) -> None:
    save(tmp_path / "c", checkpoint(InFlight({}, 0, {(0, 0): stage(), (1, 0): stage()})), {})
    file = tmp_path / "c" / "stage-1.worker-1.update-5.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"stage-1\S*\.safetensors whose bytes"):
        load(tmp_path / "c")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no stage-1\S*\.safetensors"):
        load(tmp_path / "c")


def test_whether_the_end_of_a_run_is_after_a_position() -> None:
    position = checkpoint(None).position
    assert Until(updates=9).is_after(position)
    assert Until(epochs=2).is_after(position)
    assert not Until(updates=5).is_after(position)
    assert not Until(epochs=1).is_after(position)
    assert not Until().is_after(replace(position, updates=0, epoch=0))
