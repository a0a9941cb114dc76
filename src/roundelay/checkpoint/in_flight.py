"""What is in flight when a checkpoint is made: micro-batches that stages have forwarded and not yet backwarded.

Their tapes are not stored. A resumed stage forwards them again with the weights that it read the first time, starting
from the buffers after the last micro-batch that the checkpoint counts; so messages in transit need not be stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """What all stages have in flight.

    Args:
        order: the settings that the order of work depends on, by name: only a run with equal ones can resume.
        since: number of updates when the stages were last empty.
        stages: in order.
    """

    order: dict[str, str]
    since: int
    stages: tuple[StageInFlight, ...]

    @property
    def micro_batches(self) -> int:
        """How many micro-batches are in flight: stage 0 has forwarded them all."""
        return len(self.stages[0].versions)


def encode(flight: StageInFlight, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a stage's flight as JSON values and tensors by name, each memory once.

    Args:
        flight: what to encode.
        prefix: prefix of every tensor's name.
    """
    pool = _Pool(prefix)
    table = {
        "versions": {str(g): version for g, version in flight.versions.items()},
        "weights": [[*key, pool.names(weights)] for key, weights in flight.weights.items()],
        "keep": flight.keep,
        "last": {
            name: [last.rate, pool.name(last.displacement), pool.name(last.gradient)]
            for name, last in flight.last.items()
        },
        "norms": {str(g): norm for g, norm in flight.norms.items()},
        "newest": flight.newest,
        "scales": {str(g): scale for g, scale in flight.scales.items()},
    }
    return table, pool.tensors


def decode(table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StageInFlight:
    """Return the flight that :func:`encode` encoded."""

    def named(names: Mapping[str, str]) -> Weights:
        return {name: tensors[key] for name, key in names.items()}

    def maybe(key: str | None) -> Tensor | None:
        return None if key is None else tensors[key]

    return StageInFlight(
        versions={int(g): version for g, version in table["versions"].items()},
        weights={(version, distance, g): named(names) for version, distance, g, names in table["weights"]},
        keep=table["keep"],
        last={n: LastStep(rate, maybe(moved), maybe(found)) for n, (rate, moved, found) in table["last"].items()},
        norms={int(g): norm for g, norm in table["norms"].items()},
        newest=table["newest"],
        scales={int(g): scale for g, scale in table.get("scales", {}).items()},
    )


class _Pool:
    """Assigns names to tensors; the same memory gets one name."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def name(self, tensor: Tensor | None) -> str | None:
        """The name of a tensor; None for None."""
        return None if tensor is None else self._name(tensor)

    def names(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The names of several tensors."""
        return {name: self._name(tensor) for name, tensor in tensors.items()}

    def _name(self, tensor: Tensor) -> str:
        address = tensor.untyped_storage().data_ptr()
        identity = (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if identity not in self._names:
            self._names[identity] = f"{self._prefix}{len(self._names)}"
            self.tensors[self._names[identity]] = tensor
        return self._names[identity]
