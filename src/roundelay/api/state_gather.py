"""Join the states that all stages report into one snapshot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.checkpoint.in_flight_state import StageInFlight, decode
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.worker_messages import Report


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of all stages at one version.

    Args:
        header: the last micro-batch of its last update.
        parameters: by name.
        buffers: by name.
        optimizer: state by parameter name.
        flight: what every stage has in flight, if the snapshot is for a checkpoint.
        loss_scale: if dynamic: the next scale of stage 0, and the number of finite batches in a row; else None.
    """

    header: MicroBatch
    parameters: dict[str, torch.Tensor] = field(hash=False)
    buffers: dict[str, torch.Tensor] = field(hash=False)
    optimizer: dict[str, dict[str, Any]] = field(hash=False)
    flight: tuple[StageInFlight, ...] | None = field(default=None, hash=False)
    loss_scale: tuple[float, int] | None = None


class StateGatherer:
    """Takes the stages' reports of their state, in the order of their arrival.

    Args:
        num_stages: number of stages, each of which reports its own state.
        on_snapshot: called when all stages have reported their state of one version.
    """

    def __init__(self, num_stages: int, on_snapshot: Callable[[Snapshot], None]) -> None:
        self._num_stages, self._on_snapshot = num_stages, on_snapshot
        self._states: dict[int, list[Report]] = defaultdict(list)

    def take(self, report: Report) -> None:
        """Take one report of the kind ``state``."""
        header = MicroBatch.of(tuple(report.data["header"]))
        parts = self._states[header.g]
        parts.append(report)
        if len(parts) == self._num_stages:
            del self._states[header.g]
            self._on_snapshot(_joined(header, sorted(parts, key=lambda part: part.data["stage"])))


def _joined(header: MicroBatch, parts: Sequence[Report]) -> Snapshot:
    """Join the states of all stages, in order. A buffer of several stages is the same in all: none changes it."""
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = defaultdict(dict)
    flight: list[StageInFlight] = []
    scale: tuple[float, int] | None = None
    for part in parts:
        for name, tensor in part.tensors.items():
            kind, rest = name.split(" ", 1)
            if kind == "state":
                parameter, key = rest.split("\n")
                optimizer[parameter][key] = tensor
            elif kind == "parameter":
                parameters[rest] = tensor
            elif kind == "buffer":
                buffers.setdefault(rest, tensor)
        for parameter, numbers in part.data["numbers"].items():
            optimizer[parameter].update(numbers)
        if "scale" in part.data:
            now, streak = part.data["scale"]
            scale = now, streak
        if "flight" in part.data:
            flight.append(decode(part.data["flight"], part.tensors))
    return Snapshot(header, parameters, buffers, dict(optimizer), tuple(flight) or None, scale)
