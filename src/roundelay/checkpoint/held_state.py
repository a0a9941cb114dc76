"""The training state that one holder (a stage on its worker) has after an update; joined, that of the whole model.

A holder's state is encoded in one way, as plain values and tensors by name, whether it is sent to the launcher or
written to a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from roundelay.checkpoint import in_flight_state
from roundelay.checkpoint.in_flight_state import Flights, StageInFlight
from roundelay.checkpoint.shards import Ranges, Shard, common_parts, join_shards, missing_ranges
from roundelay.errors import CheckpointError

UNUSED = -1
"""In place of a stage's number: parameters and buffers that no stage has, as the loss does not depend on them."""

_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """What one holder has after an update.

    Args:
        stage: number of the stage, or :data:`UNUSED`.
        parameters: the shards that it has, by the parameter's first name.
        buffers: by first name.
        optimizer: the state of its parameters, and under the empty name that of the optimizer as a whole; a value is a
            tensor, an int, float, bool, str or None. A tensor with the shape of the parameter's shard is the same shard
            of that state.
        flight: what it has in flight; None if nothing.
        loss_scale: on stage 0, a dynamic loss scale, and how many finite batches in a row preceded it; else None.
        replica: of which replica it is a holder. Those after the first have only buffers, and what is in flight: the
            rest they have in common.
        holder: its number among those of the stage.
    """

    stage: int
    parameters: dict[str, Shard]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    flight: StageInFlight | None = None
    loss_scale: tuple[float, int] | None = None
    replica: int = 0
    holder: int = 0


class StateTable(msgspec.Struct, forbid_unknown_fields=True):
    """A :class:`HeldState` without its tensors, which have the names of their parameters and buffers.

    A tensor in the optimizer's state is ``{"tensor": NAME}``.
    """

    stage: int
    parameters: dict[str, Ranges]
    buffers: list[str]
    optimizer: dict[str, dict[str, int | float | bool | str | dict[str, str] | None]]
    flight: dict[str, Any] | None
    loss_scale: tuple[float, int] | None
    replica: int = 0
    holder: int = 0


def encode(held: HeldState) -> tuple[StateTable, dict[str, Tensor]]:
    """The state as plain values, and its tensors by name.

    Raises:
        CheckpointError: a value of the optimizer's state cannot be stored.
    """
    tensors = {name: shard.tensor for name, shard in held.parameters.items()} | held.buffers
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in held.optimizer.items():
        states[parameter] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                name = _free(f"{parameter}/{key}", tensors)
                tensors[name] = value
                states[parameter][key] = {"tensor": name}
            else:
                states[parameter][key] = _plain(value, parameter, key)
    flight = None
    if held.flight is not None:
        flight, in_flight = in_flight_state.encode(held.flight, f"in flight, stage {held.stage}: ")
        tensors |= in_flight
    ranges = {name: shard.ranges for name, shard in held.parameters.items()}
    own = held.loss_scale, held.replica, held.holder
    table = StateTable(held.stage, ranges, list(held.buffers), states, flight, *own)
    return table, tensors


def decode(table: StateTable, tensors: Mapping[str, Tensor]) -> HeldState:
    """The inverse of :func:`encode`.

    Raises:
        KeyError, msgspec.ValidationError: the table does not fit the tensors.
    """
    return HeldState(
        table.stage,
        {name: Shard(ranges, tensors[name]) for name, ranges in table.parameters.items()},
        {name: tensors[name] for name in table.buffers},
        {
            parameter: {k: tensors[v["tensor"]] if isinstance(v, dict) else v for k, v in state.items()}
            for parameter, state in table.optimizer.items()
        },
        None if table.flight is None else in_flight_state.decode(table.flight, tensors),
        table.loss_scale,
        table.replica,
        table.holder,
    )


@dataclass(frozen=True, slots=True, eq=False)
class JoinedState:
    """The state of the whole model.

    Args:
        parameters: by first name.
        buffers: those of the first replica, by first name.
        optimizer: as in :class:`HeldState`.
        flight: what every stage has in flight; None if nothing.
        loss_scale: as in :class:`HeldState`.
        replica_buffers: those of the other replicas, in order.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    flight: Flights | None = None
    loss_scale: tuple[float, int] | None = None
    replica_buffers: tuple[dict[str, Tensor], ...] = ()


def missing_part(
    shapes: Mapping[str, Sequence[int]], holders: Sequence[Mapping[str, Ranges] | Mapping[str, Shard]]
) -> str:
    """The first part of a parameter that no holder has, in words; empty if together they have every element.

    Args:
        shapes: of the parameters, whole, by name.
        holders: for each, the parameters that it has, with their ranges.
    """
    for name, shape in shapes.items():
        found = [parameters[name] for parameters in holders if name in parameters]
        held = [part.ranges if isinstance(part, Shard) else part for part in found]
        missing = missing_ranges(shape, held)
        if missing is not None:
            where = ", ".join(f"{begin}:{end}" for begin, end in missing)
            return f"parameter {name!r}[{where}]" if where else f"parameter {name!r}"
    return ""


def join(shapes: Mapping[str, Sequence[int]], states: Sequence[HeldState]) -> JoinedState:
    """Join the states of all holders; where several have the same, the first counts.

    Args:
        shapes: of the parameters to join, whole, by name; together the holders have every element of them.
        states: of all holders, in the order of their stages.
    """
    buffers: list[dict[str, Tensor]] = [{} for _ in range(1 + max((state.replica for state in states), default=0))]
    for state in states:
        for name, tensor in state.buffers.items():
            buffers[state.replica].setdefault(name, tensor)
    flights = {(state.stage, state.holder): state.flight for state in states if state.flight is not None}
    return JoinedState(
        {name: join_shards(shape, _shards(name, states)) for name, shape in shapes.items()},
        buffers[0],
        {name: _joined_entries(name, shapes.get(name), states) for state in states for name in state.optimizer},
        flights or None,
        next((state.loss_scale for state in states if state.loss_scale is not None), None),
        tuple(buffers[1:]),
    )


def _shards(name: str, states: Sequence[HeldState]) -> list[Shard]:
    return [state.parameters[name] for state in states if name in state.parameters]


def _joined_entries(name: str, shape: Sequence[int] | None, states: Sequence[HeldState]) -> dict[str, Any]:
    """Join the entries of the optimizer's state of one parameter, or of the optimizer as a whole."""
    holders = [state for state in states if name in state.optimizer]
    entries: dict[str, Any] = {}
    for state in holders:
        for key, value in state.optimizer[name].items():
            if key not in entries:
                shards = [] if shape is None else _entry_shards(name, key, holders)
                entries[key] = join_shards(shape, shards) if shape is not None and shards else value
    return entries


def _entry_shards(name: str, key: str, holders: Sequence[HeldState]) -> list[Shard]:
    """The shards of an entry that is sharded as its parameter is; empty for one that every holder has whole."""
    shards = []
    for state in holders:
        own, value = state.parameters.get(name), state.optimizer[name].get(key)
        if own is None or not isinstance(value, Tensor) or value.shape != own.tensor.shape:
            return []
        shards.append(Shard(own.ranges, value))
    return shards


def disagreement(states: Sequence[HeldState]) -> str:
    """What two holders of the same elements have different values of, in words; empty if they agree in every bit."""
    for i, one in enumerate(states):
        for other in states[i + 1 :]:
            for name in one.parameters.keys() & other.parameters.keys():
                common = common_parts(one.parameters[name], other.parameters[name])
                if common is not None and not _same_bits(*common):
                    return f"parameter {name!r}"
            for name in one.buffers.keys() & other.buffers.keys() if one.replica == other.replica else ():
                if not _same_bits(one.buffers[name], other.buffers[name]):
                    return f"buffer {name!r}"
    return ""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _free(name: str, taken: Mapping[str, Tensor]) -> str:
    """Make a name unique: parameter ``a`` with key ``b/c`` must not collide with ``a/b`` with key ``c``."""
    while name in taken:
        name += "+"
    return name


def _plain(value: Any, parameter: str, key: str) -> Any:
    """Return a state value that JSON can hold; subclasses are refused: they would not be restored as themselves."""
    if type(value) not in _PLAIN:
        raise CheckpointError(
            f"optimizer state {key!r} of parameter {parameter!r}",
            got=f"a value of type {type(value).__name__}",
            expected="a tensor, an int, float, bool, str or None",
            remedy="Use an optimizer whose state consists of these.",
        )
    return value
