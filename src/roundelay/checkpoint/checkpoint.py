"""Checkpoints: folders from which a run is resumed or a model is loaded.

=========================  ====================================================================================
``model.safetensors``      parameters and buffers by their first name; a tied one once
``optimizer.safetensors``  the tensors of the optimizer's state, as ``PARAMETER/KEY``
``flight.safetensors``     what was in flight, if anything was
``checkpoint.json``        everything else: position, seed, other state values, ties, and the SHA-256 of each file
=========================  ====================================================================================

Values survive bit for bit with dtype and shape; tensors come back contiguous on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from roundelay.checkpoint.atomic_files import replacing_folder, unwritten
from roundelay.checkpoint.in_flight_state import InFlight, decode, encode
from roundelay.checkpoint.stored_files import FILES, MANIFEST, StoredFiles, damaged, read, write
from roundelay.errors import CheckpointError, InternalError
from roundelay.ir.plan import EMA, EVALUATED

_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has progressed.

    Args:
        updates: updates done.
        micro_batches: micro-batches done; the next one's global number g.
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
    """The state from which a run is resumed.

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


def save(path: Path, checkpoint: Checkpoint, aliases: Mapping[str, str]) -> None:
    """Write a checkpoint to ``path``; an existing one stays loadable until the new one is complete and on disk.

    Args:
        path: the checkpoint's folder. Parents are created; other files in an existing checkpoint's folder are kept.
        checkpoint: what to write.
        aliases: maps each further name of a tied parameter or buffer to its first name.

    Raises:
        CheckpointError: something else is at ``path``, or a value cannot be stored.
        RunError: it cannot be written, for example because the disk is full; the old one is intact.
    """
    folder_path = path.resolve()
    _check_aliases(checkpoint, aliases)
    stored = _encode(checkpoint, aliases)
    try:
        _refuse_foreign(folder_path)
        with replacing_folder(folder_path, FILES) as folder:
            write(folder, stored)
    except (OSError, SafetensorError) as error:
        raise unwritten(path, error) from error


def load(path: Path) -> Checkpoint:
    """Read the checkpoint at ``path``.

    Raises:
        CheckpointError: it is missing, damaged, no checkpoint, or of a newer format.
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


def _check_aliases(checkpoint: Checkpoint, aliases: Mapping[str, str]) -> None:
    names = {*checkpoint.parameters, *checkpoint.buffers}
    wrong = [alias for alias, first in aliases.items() if alias in names or first not in names]
    if wrong:
        raise InternalError(
            f"alias {wrong[0]!r} of {aliases[wrong[0]]!r} in a checkpoint",
            got="an alias that is itself stored, or whose first name is not",
            expected="the first name stored, and it alone",
            remedy="Report this as a bug of Roundelay.",
        )


def _refuse_foreign(place: Path) -> None:
    """Refuse to replace anything but a checkpoint or an empty folder."""
    if place.exists() and not (place / MANIFEST).is_file() and not (place.is_dir() and not any(place.iterdir())):
        raise CheckpointError(
            f"checkpoint {place}",
            got="something else at this place",
            expected="nothing, an empty folder, or a checkpoint",
            remedy="Save to another place, or move that away.",
        )


class _Facts(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a checkpoint that are stored as they are."""

    position: Position
    seed: int
    fingerprint: str
    rule: str
    num_stages: int
    until: Until
    loss_scale: tuple[float, int] | None
    numbers: tuple[float, ...]
    optimizer_kind: str
    began: str


class _Flight(msgspec.Struct, forbid_unknown_fields=True):
    """What was in flight; the stages as :func:`roundelay.checkpoint.in_flight_state.encode` encodes them."""

    order: dict[str, str]
    since: int
    stages: list[dict[str, Any]]


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """The content of ``checkpoint.json``; a tensor in the optimizer's state is ``{"tensor": NAME}``."""

    facts: _Facts
    parameters: list[str]
    buffers: list[str]
    aliases: dict[str, str]
    optimizer: dict[str, dict[str, int | float | bool | str | dict[str, str] | None]]
    flight: _Flight | None


def _encode(checkpoint: Checkpoint, aliases: Mapping[str, str]) -> StoredFiles:
    facts = _Facts(*(getattr(checkpoint, name) for name in _Facts.__struct_fields__))
    states, state_tensors = _encode_states(checkpoint.optimizer)
    flight, flight_tensors = _encode_flight(checkpoint.flight) if checkpoint.flight else (None, None)
    manifest = _Manifest(facts, list(checkpoint.parameters), list(checkpoint.buffers), dict(aliases), states, flight)
    tensors = checkpoint.parameters | checkpoint.buffers
    return StoredFiles(msgspec.to_builtins(manifest), tensors, state_tensors, flight_tensors)


def _encode_states(optimizer: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """The optimizer's state with names in the place of tensors, and these tensors."""
    tensors: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.items():
        states[parameter] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                name = _free(f"{parameter}/{key}", tensors)
                tensors[name] = value
                states[parameter][key] = {"tensor": name}
            else:
                states[parameter][key] = _plain(value, parameter, key)
    return states, tensors


def _encode_flight(flight: InFlight) -> tuple[_Flight, dict[str, Tensor]]:
    parts = [encode(stage, f"stage {k} ") for k, stage in enumerate(flight.stages)]
    tensors = {name: tensor for _, tensors in parts for name, tensor in tensors.items()}
    return _Flight(flight.order, flight.since, [table for table, _ in parts]), tensors


def _free(name: str, taken: Mapping[str, Tensor]) -> str:
    """Make a name unique: parameter ``a`` with key ``b/c`` must not collide with ``a/b`` with key ``c``."""
    while name in taken:
        name += "+"
    return name


def _open(path: Path) -> tuple[Checkpoint, dict[str, tuple[str, Tensor]]]:
    """Read the checkpoint at ``path``, and the first name and the tensor of each alias."""
    stored = read(path)
    try:
        manifest = msgspec.convert(stored.content, _Manifest)
        checkpoint = _decode(manifest, stored)
        return checkpoint, {alias: (first, stored.model[first]) for alias, first in manifest.aliases.items()}
    except (KeyError, msgspec.ValidationError) as error:
        fault = f"no tensor {error}" if isinstance(error, KeyError) else error
        raise damaged(path, f"a {MANIFEST} that does not fit its tensors ({fault})") from error


def _decode(manifest: _Manifest, stored: StoredFiles) -> Checkpoint:
    flight = None
    if manifest.flight is not None and stored.flight is not None:
        stages = tuple([decode(table, stored.flight) for table in manifest.flight.stages])
        flight = InFlight(manifest.flight.order, manifest.flight.since, stages)
    return Checkpoint(
        parameters={name: stored.model[name] for name in manifest.parameters},
        buffers={name: stored.model[name] for name in manifest.buffers},
        optimizer={
            parameter: {
                key: stored.optimizer[value["tensor"]] if isinstance(value, dict) else value
                for key, value in state.items()
            }
            for parameter, state in manifest.optimizer.items()
        },
        flight=flight,
        **msgspec.structs.asdict(manifest.facts),
    )


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
