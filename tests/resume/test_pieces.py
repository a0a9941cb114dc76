"""Each piece of what a checkpoint in mid-flight holds is needed: a run that goes on without it is another run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from roundelay.checkpoint.checkpoint import Checkpoint, load
from roundelay.checkpoint.in_flight_state import StageInFlight
from roundelay.errors import UserCodeError
from roundelay.session.training import Saving
from roundelay.weight_prediction import LastStep
from tests.equivalence.cells import VARIANTS
from tests.resume.cuts import differences, every_checkpoint
from tests.resume.test_rules import trip

Change = Callable[[Checkpoint], Checkpoint]
Spoil = Callable[[StageInFlight], StageInFlight]


def each(spoil: Spoil) -> Change:
    """Change what every stage has in flight."""

    def change(start: Checkpoint) -> Checkpoint:
        assert start.flight is not None
        stages = {port: spoil(stage) for port, stage in start.flight.stages.items()}
        return dataclasses.replace(start, flight=dataclasses.replace(start.flight, stages=stages))

    return change


def newest(start: Checkpoint) -> Checkpoint:
    """In place of the weights that forwards in flight have read, the newest ones."""

    def spoil(stage: StageInFlight) -> StageInFlight:
        weights = {key: {n: start.parameters[n] for n in named} for key, named in stage.weights.items()}
        return dataclasses.replace(stage, weights=weights)

    return each(spoil)(start)


def drained(start: Checkpoint) -> Checkpoint:
    """Without anything in flight."""
    return dataclasses.replace(start, flight=None)


def other_versions(stage: StageInFlight) -> StageInFlight:
    """As if what is in flight had been forwarded one update later, with the same weights."""
    later = {g: version + 1 for g, version in stage.versions.items()}
    weights = {(v, d, g): named for (v, d, g), named in stage.weights.items()}
    weights |= {(v + 1, max(d - 1, 0), g): named for (v, d, g), named in stage.weights.items()}
    return dataclasses.replace(stage, versions=later, weights=weights)


def without_last(stage: StageInFlight) -> StageInFlight:
    """As a checkpoint from which a run starts with empty stages: nothing is known of the last update."""
    nothing = {name: LastStep(rate=0.0, displacement=None, gradient=None) for name in stage.last}
    return dataclasses.replace(stage, last=nothing)


def no_displacement(stage: StageInFlight) -> StageInFlight:
    """The last update led nowhere."""
    still = {
        name: LastStep(last.rate, torch.zeros_like(last.displacement), last.gradient)
        for name, last in stage.last.items()
        if last.displacement is not None
    }
    return dataclasses.replace(stage, last=stage.last | still)


def no_gradient(stage: StageInFlight) -> StageInFlight:
    """The last update had no gradient."""
    still = {
        name: LastStep(last.rate, last.displacement, torch.zeros_like(last.gradient))
        for name, last in stage.last.items()
        if last.gradient is not None
    }
    return dataclasses.replace(stage, last=stage.last | still)


def kept_away(stage: StageInFlight) -> StageInFlight:
    """Without older versions for forwards to come."""
    return dataclasses.replace(stage, keep=None)


def later_buffers(start: Checkpoint) -> Checkpoint:
    """Buffers that the forwards in flight have changed already."""
    buffers = {n: b + 1 if b.is_floating_point() else b for n, b in start.buffers.items()}
    return dataclasses.replace(start, buffers=buffers)


PIECES: dict[str, tuple[str, str, tuple[int, int], str, Change]] = {
    "everything, stash": ("skip", "pipedream", (4, 1), "adamw", drained),
    "everything, mixed": ("skip", "pipeoptim improved mixed", (4, 1), "adamw", drained),
    "weights, stash": ("skip", "pipedream", (4, 1), "adamw", newest),
    "weights, mixed": ("skip", "pipeoptim improved mixed", (4, 1), "adamw", newest),
    "weights, recompute, of a tied weight": ("tied_head", "async recompute", (4, 1), "sgd", newest),
    "versions that travel": ("skip", "pipedream-vertical", (4, 1), "adamw", each(other_versions)),
    "the last update": ("skip", "pipeoptim paper mixed", (4, 1), "sgd", each(without_last)),
    "its displacement": ("skip", "pipeoptim paper mixed", (4, 1), "sgd", each(no_displacement)),
    "its gradient": ("skip", "pipeoptim released-code stash", (4, 1), "nesterov", each(no_gradient)),
    "older versions, table": ("skip", "pipedream-2bw", (3, 4), "adamw", each(kept_away)),
    "older versions, entry": ("skip", "pipedream-vertical", (4, 1), "adamw", each(kept_away)),
    "buffers": ("batchnorm", "pipedream", (4, 1), "adamw", later_buffers),
}


@pytest.mark.parametrize("piece", PIECES)
def test_without_it_the_run_is_another(piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, variant, sizes, optimizer, change = PIECES[piece]
    made = trip(model, VARIANTS[variant], sizes, optimizer)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "4")
    assert differences(whole, made.rest(start), start) == []
    if piece.startswith("older versions"):
        with pytest.raises(UserCodeError, match="KeyError"):  # a version that is read and not there
            made.rest(change(start))
    else:
        assert differences(whole, made.rest(change(start)), start)
