"""Checkpoints: folders from which a run is resumed or a model is loaded.

====================================  =========================================================================
``stage-K.worker-W.update-U...``      a safetensors file for each holder: its shards of parameters, buffers, the
                                      optimizer's state as ``PARAMETER/KEY``, and what was in flight
``unused.update-U...``                parameters and buffers that no stage has, if there are any
``checkpoint.json``                   the manifest: position, seed, and for each file its SHA-256, which ranges of
                                      which parameters it has, and all state values that are no tensors
====================================  =========================================================================

Each holder writes its own file; nothing needs the whole model in one process. A checkpoint can be loaded onto any other
placement. Values survive bit for bit with dtype and shape; tensors come back contiguous on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from roundelay.checkpoint.held_state import HeldState, JoinedState, decode, join, missing_part
from roundelay.checkpoint.in_flight_state import InFlight
from roundelay.checkpoint.shards import lies_in
from roundelay.checkpoint.stored_files import (
    MANIFEST,
    StoredState,
    damaged,
    holds_only_own,
    is_checkpoint,
    read,
    remove_leftovers,
    write_manifest,
)
from roundelay.errors import CheckpointError, InternalError
from roundelay.ir.averages import EMA, EVALUATED


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has progressed.

    Args:
        updates: updates done.
        micro_batches: micro-batches done, over all replicas; the next one's number.
        epoch: number of the current epoch, from 0.
        batches_into_epoch: batches of that epoch already used.
    """

    updates: int
    micro_batches: int
    epoch: int
    batches_into_epoch: int


@dataclass(frozen=True, slots=True)
class Until:
    """When the run that made a checkpoint was to stop.

    Args:
        updates: in total, earlier runs included; None if not limited.
        epochs: in total, likewise; None if not limited.
    """

    updates: int | None = None
    epochs: int | None = None

    def is_after(self, position: Position) -> bool:
        """Whether `position` is before this end."""
        return (self.updates or 0) > position.updates or (self.epochs or 0) > position.epoch


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state from which a run is resumed, joined from its holders'.

    Args:
        parameters: by their first name in the model.
        buffers: by their first name in the model.
        optimizer: the state of each parameter, and under the empty name that of the optimizer as a whole; a value is a
            tensor, an int, float, bool, str or None.
        position: how far the run has progressed.
        seed: the run's seed.
        fingerprint: identity of the model's graph (:attr:`roundelay.ir.graph.Graph.fingerprint`).
        rule: name of the update rule.
        num_stages: stages of the plan.
        flight: what was in flight; None if the stages were empty.
        until: when the run was to stop.
        loss_scale: a dynamic loss scale, and how many finite batches in a row preceded it; None without one.
        numbers: the evaluation results of each epoch, if a learning rate schedule reads them.
        optimizer_kind: name of the optimizer's class.
        began: digest of the run's initial state and settings, if they were the same from its first update on; empty if
            they were not, or if that is not known.
        replica_buffers: buffers of the replicas after the first, in order.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    position: Position
    seed: int
    fingerprint: str
    rule: str
    num_stages: int
    flight: InFlight | None = None
    until: Until = Until()
    loss_scale: tuple[float, int] | None = None
    numbers: tuple[float, ...] = ()
    optimizer_kind: str = ""
    began: str = ""
    replica_buffers: tuple[dict[str, Tensor], ...] = ()


class Facts(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What a checkpoint says of its run; the fields of :class:`Checkpoint` that no holder has."""

    position: Position
    seed: int
    fingerprint: str
    rule: str
    num_stages: int
    until: Until = Until()
    numbers: tuple[float, ...] = ()
    optimizer_kind: str = ""
    began: str = ""


class FlightFacts(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a checkpoint says of all that is in flight: see :class:`~roundelay.checkpoint.in_flight_state.InFlight`."""

    order: dict[str, str]
    since: int


class Manifest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The content of ``checkpoint.json``.

    Args:
        facts: of the run.
        shapes: the whole shape of every parameter, by its first name.
        aliases: maps each further name of a tied parameter or buffer to its first name.
        flight: None if the stages were empty.
        holders: the holders' states, in the order of their stages.
    """

    facts: Facts
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    flight: FlightFacts | None = None
    holders: list[StoredState]


def prepare(path: Path) -> None:
    """Check the folder into which a run will write its checkpoints, and remove what interrupted ones have left in it.

    Raises:
        CheckpointError: something else is at ``path``.
    """
    if path.exists() and not (path.is_dir() and (is_checkpoint(path) or holds_only_own(path))):
        raise CheckpointError(
            f"checkpoint {path}",
            got="something else at this place",
            expected="nothing, an empty folder, or a checkpoint",
            remedy="Save to another place, or move that away.",
        )
    remove_leftovers(path)


def commit(path: Path, manifest: Manifest) -> None:
    """Complete a checkpoint whose files are written; until then the one before is loadable, from then on this one.

    Args:
        path: the checkpoint's folder. Files of anyone else in it are kept.
        manifest: names the files.

    Raises:
        InternalError: the holders together do not have every element of every parameter.
        RunError: it cannot be written, for example because the disk is full; the one before is intact.
    """
    missing = missing_part(manifest.shapes, [holder.table.parameters for holder in manifest.holders])
    names = {name for holder in manifest.holders for name in (*holder.table.parameters, *holder.table.buffers)}
    wrong = [alias for alias, first in manifest.aliases.items() if alias in names or first not in names]
    if missing or wrong:
        raise InternalError(
            "a checkpoint",
            got=f"no holder of {missing}" if missing else f"an alias {wrong[0]!r} that does not name a stored tensor",
            expected="every element of every parameter, and aliases of stored names",
            remedy="Report this as a bug of Roundelay.",
        )
    files = [holder.file for holder in manifest.holders]
    write_manifest(path, msgspec.to_builtins(manifest), files, manifest.facts.position.updates)


def load(path: Path) -> Checkpoint:
    """Read the checkpoint at ``path``. Its tensors are mapped where one holder has them whole: copy them to compute.

    Raises:
        CheckpointError: it is missing, damaged, no checkpoint, or of another format.
    """
    return _open(path)[0]


def load_into(model: torch.nn.Module, path: Path, *, averaged: bool = False) -> torch.nn.Module:
    """Copy a checkpoint's parameters and buffers into ``model``, and return it; tied parameters stay tied.

    Names and shapes must agree exactly, except that non-persistent buffers may be absent from the checkpoint. Dtypes,
    devices and memory formats stay the model's. On an error the model is unchanged.

    Raises:
        CheckpointError: as :func:`load`; or a name is missing or unexpected, or a shape differs; the first is named.
    """
    checkpoint, ties = _open(path)
    parameters = checkpoint.parameters | _evaluated(path, checkpoint, averaged)
    aliases = {alias: parameters.get(first, value) for alias, (first, value) in ties.items()}
    values = parameters | checkpoint.buffers | aliases
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    _check_names(path, set(own) & set(model.state_dict()), own, values)
    _check_values(path, own, values)
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    return model


def _evaluated(path: Path, checkpoint: Checkpoint, averaged: bool) -> dict[str, Tensor]:
    """The weights to evaluate with, by name, where they differ from the trained ones."""
    key = EMA if averaged else EVALUATED
    weights = {name: state[key] for name, state in checkpoint.optimizer.items() if key in state}
    if averaged and not weights:
        raise CheckpointError(
            f"checkpoint {path}",
            got="no averages of weights",
            expected="those of a run with `ema`",
            remedy="Leave averaged=True out, or train with --ema 0.999.",
        )
    return weights


def _check_names(path: Path, required: set[str], own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    missing = [name for name in own if name in required and name not in values]
    if missing:
        raise _of_another_model(path, f"no value for {missing[0]!r}, which the model has", "one for each of its names")
    unexpected = [name for name in values if name not in own]
    if unexpected:
        raise _of_another_model(path, f"a value for {unexpected[0]!r}", "only names that the model has")


def _check_values(path: Path, own: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    first_name: dict[int, str] = {}
    for name in values:
        target, value = own[name], values[name]
        if target.is_meta or target.shape != value.shape:
            expected = "a model with values" if target.is_meta else f"shape {tuple(target.shape)}, as in the model"
            raise _of_another_model(path, f"shape {tuple(value.shape)} for {name!r}", expected)
        other = first_name.setdefault(id(target), name)
        if values[other] is not value and not torch.equal(values[other], value):
            raise _of_another_model(path, f"two values for {other!r} and {name!r}", "one, as the model ties them")


def _of_another_model(path: Path, got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}", got=got, expected=expected, remedy="Build the model as it was when the run began."
    )


def _open(path: Path) -> tuple[Checkpoint, dict[str, tuple[str, Tensor]]]:
    """Read the checkpoint at ``path``, and the first name and the tensor of each alias."""
    content, tensors = read(path)
    try:
        manifest = msgspec.convert(content, Manifest)
        states = [decode(holder.table, tensors[holder.file]) for holder in manifest.holders]
        _check_shards(path, manifest.shapes, states)
        joined = join(manifest.shapes, states)
        values = joined.parameters | joined.buffers
        aliases = {alias: (first, values[first]) for alias, first in manifest.aliases.items()}
    except (KeyError, msgspec.ValidationError) as error:
        fault = f"no tensor {error}" if isinstance(error, KeyError) else error
        raise damaged(path, f"a {MANIFEST} that does not fit its tensors ({fault})") from error
    return _checkpoint(manifest, joined), aliases


def _check_shards(path: Path, shapes: Mapping[str, Sequence[int]], states: Sequence[HeldState]) -> None:
    for state in states:
        for name, shard in state.parameters.items():
            if not lies_in(shapes[name], shard):
                raise damaged(path, f"a {MANIFEST} that does not fit its tensors (ranges of {name!r})")
    missing = missing_part(shapes, [state.parameters for state in states])
    if missing:
        raise damaged(path, f"no file with {missing}")


def _checkpoint(manifest: Manifest, joined: JoinedState) -> Checkpoint:
    flight = manifest.flight
    return Checkpoint(
        parameters=joined.parameters,
        buffers=joined.buffers,
        optimizer=joined.optimizer,
        flight=None if flight is None or joined.flight is None else InFlight(flight.order, flight.since, joined.flight),
        loss_scale=joined.loss_scale,
        replica_buffers=joined.replica_buffers,
        **msgspec.structs.asdict(manifest.facts),
    )
