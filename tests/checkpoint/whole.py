"""Write a checkpoint from one process, as if its holders had each written their part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from roundelay.checkpoint.checkpoint import Checkpoint, Facts, FlightFacts, Manifest, commit, prepare
from roundelay.checkpoint.held_state import HeldState
from roundelay.checkpoint.shards import Shard, whole_ranges
from roundelay.checkpoint.stored_files import write_state


def held(checkpoint: Checkpoint) -> list[HeldState]:
    """All weights and states on stage 0; what is in flight on its own stage."""
    parameters = {name: Shard(whole_ranges(t.shape), t) for name, t in checkpoint.parameters.items()}
    flying = {} if checkpoint.flight is None else checkpoint.flight.stages
    flights = [flying.get((k, 0)) for k in range(max(1, len(flying)))]
    first = HeldState(0, parameters, checkpoint.buffers, checkpoint.optimizer, flights[0], checkpoint.loss_scale)
    return [first, *(HeldState(k, {}, {}, {}, flight) for k, flight in enumerate(flights) if k)]


def save(path: Path, checkpoint: Checkpoint, aliases: Mapping[str, str]) -> None:
    """Write a whole checkpoint."""
    folder = path.resolve()
    prepare(folder)
    complete(folder, checkpoint, held(checkpoint), aliases)


def complete(path: Path, checkpoint: Checkpoint, states: list[HeldState], aliases: Mapping[str, str]) -> None:
    """Write these holders' states, and the manifest that joins them."""
    flight = checkpoint.flight
    commit(
        path,
        Manifest(
            facts=Facts(**{name: getattr(checkpoint, name) for name in Facts.__struct_fields__}),
            shapes={name: tuple(tensor.shape) for name, tensor in checkpoint.parameters.items()},
            aliases=dict(aliases),
            flight=None if flight is None else FlightFacts(flight.order, flight.since),
            holders=[write_state(path, state, state.stage, checkpoint.position.updates) for state in states],
        ),
    )
