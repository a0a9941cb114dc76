"""What is in flight when a checkpoint is made: micro-batches that stages have forwarded and not yet backwarded.

Their tapes are not stored. A resumed stage forwards them again with the weights that it read the first time, starting
from the buffers after the last micro-batch that the checkpoint counts; so messages in transit need not be stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor

from roundelay.weight_prediction import LastStep

Key = tuple[int, int, int]
"""Which weights: the version, the distance of their prediction (0: none), and the only micro-batch that reads them, or
:data:`ANY`."""

ANY = -1

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StageInFlight:
    """What one stage needs to resume in mid-flight, in addition to weights, optimizer state and buffers.

    Args:
        versions: for each micro-batch in flight, the stage's updates before its forward.
        weights: the weights that these forwards read, and older versions that later forwards may read; by name.
        keep: the oldest version that a later forward may read; None if each reads the newest.
        last: for each parameter, its last update, as far as a prediction reads it.
        norms: on stage 0, for each micro-batch in flight, the gradient norm sent with it, for clipping.
        newest: on stage 0, the newest of these norms.
        scales: for each micro-batch in flight, its loss scale, if losses are scaled.
    """

    versions: dict[int, int]
    weights: dict[Key, Weights]
    keep: int | None
    last: dict[str, LastStep]
    norms: dict[int, float | None] = field(default_factory=dict)
    newest: float | None = None
    scales: dict[int, float] = field(default_factory=dict)


Flights = Mapping[tuple[int, int], StageInFlight]
"""What every stage has in flight, by (stage, holder)."""


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """What all stages have in flight.

    Args:
        order: the settings that the order of work depends on, by name: only a run with equal ones can resume.
        since: number of updates when the stages were last empty.
        stages: by (stage, holder).
    """

    order: dict[str, str]
    since: int
    stages: Flights

    @property
    def micro_batches(self) -> int:
        """How many micro-batches are in flight: stage 0 has forwarded them all."""
        return sum(len(flight.versions) for (stage, _), flight in self.stages.items() if stage == 0)

    @property
    def older_weights(self) -> bool:
        """Whether there are versions of weights that a later forward reads."""
        return any(flight.weights for flight in self.stages.values())


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `StageInFlight` as they are encoded."""

    versions: dict[int, int]
    weights: list[tuple[Key, Weights]]
    keep: int | None
    last: dict[str, LastStep]
    norms: dict[int, float | None]
    newest: float | None
    scales: dict[int, float]


def encode(flight: StageInFlight, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a stage's flight as JSON values and tensors by name, each memory once.

    Args:
        flight: what to encode.
        prefix: prefix of every tensor's name.
    """
    pool = _Pool(prefix)
    fields = {name: getattr(flight, name) for name in _Record.__struct_fields__}
    record = _Record(**fields | {"weights": list(flight.weights.items())})
    table: dict[str, Any] = msgspec.to_builtins(record, str_keys=True, enc_hook=pool.name)
    return table, pool.tensors


def decode(table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StageInFlight:
    """Return the flight that :func:`encode` encoded.

    Raises:
        KeyError, msgspec.ValidationError: the table was not written by :func:`encode`, or a tensor is missing.
    """
    record = msgspec.convert(table, _Record, str_keys=True, dec_hook=lambda _, name: tensors[name])
    return StageInFlight(**msgspec.structs.asdict(record) | {"weights": dict(record.weights)})


class _Pool:
    """Assigns names to tensors; the same memory gets one name."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def name(self, tensor: Tensor) -> str:
        """The name of a tensor."""
        address = tensor.untyped_storage().data_ptr()
        identity = (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if identity not in self._names:
            self._names[identity] = f"{self._prefix}{len(self._names)}"
            self.tensors[self._names[identity]] = tensor
        return self._names[identity]
