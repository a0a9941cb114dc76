"""What is in flight when a checkpoint is made: micro-batches that stages have forwarded and not yet backwarded.

Their tapes are not stored. A stage that goes on forwards them again, with the weights that it read the first time, from
the buffers behind the last micro-batch that the checkpoint counts; so nothing that travels is stored either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roundelay.weight_prediction import LastStep

Key = tuple[int, int, int]
"""Which weights: the version, how many updates they are predicted ahead of it (0: not at all), and the micro-batch that
alone reads them; :data:`ANY` for those that any may read."""

ANY = -1

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StageInFlight:
    """What one stage needs, besides its weights, its optimizer's state and its buffers, to go on in mid-flight.

    Args:
        versions: micro-batch in flight to the updates that the stage had made before its forward.
        weights: the weights that these forwards read, and older versions that later forwards may read; by name.
        keep: the oldest version that a later forward may read; None if each reads its newest.
        last: parameter to its last update, as far as a prediction reads it.
        norms: on stage 0, micro-batch in flight to the norm that went with it, where gradients are clipped by that.
        newest: on stage 0, the newest of these norms.
        scales: micro-batch in flight to the scale of its loss, where losses are scaled.
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
        order: what the order of work depends on, by what a person calls it: only a run of equal order can go on.
        since: updates that had been made when the stages were last empty.
        stages: in order.
    """

    order: dict[str, str]
    since: int
    stages: tuple[StageInFlight, ...]

    @property
    def micro_batches(self) -> int:
        """How many are in flight: stage 0 has forwarded them all."""
        return len(self.stages[0].versions)


def encode(flight: StageInFlight, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A stage's flight as values that JSON can hold, and tensors by name; each memory once.

    Args:
        flight: what to encode.
        prefix: of every tensor's name.
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
    """The flight that :func:`encode` took apart."""

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
    """Tensors by made-up names; one that is met again, under whatever name, keeps its first."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._met: dict[tuple[Any, ...], str] = {}

    def name(self, tensor: Tensor | None) -> str | None:
        """Its name, made if it has none."""
        return None if tensor is None else self._name(tensor)

    def names(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Names of several."""
        return {name: self._name(tensor) for name, tensor in tensors.items()}

    def _name(self, tensor: Tensor) -> str:
        address = tensor.untyped_storage().data_ptr()
        identity = (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if identity not in self._met:
            self._met[identity] = f"{self._prefix}{len(self._met)}"
            self.tensors[self._met[identity]] = tensor
        return self._met[identity]
