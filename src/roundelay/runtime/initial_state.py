"""The state from which the stages of a run start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.checkpoint.in_flight_state import Flights, StageInFlight


@dataclass(frozen=True, slots=True)
class Initial:
    """The state from which stages start: of the model itself, or of a checkpoint.

    Args:
        parameters: by name.
        buffers: by name.
        optimizer: optimizer state by parameter name, and that of the optimizer as a whole; empty for a new run.
        updates: updates made before.
        flight: what every stage had in flight, by (stage, holder); None if the stages start empty.
        loss_scale: a dynamic loss scale, and the finite batches in a row so far; None for a new run.
        numbers: metrics of the evaluations so far, for ``ReduceLROnPlateau``.
        replica_buffers: the buffers of the replicas after the first, where they have their own; by name.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]
    updates: int
    flight: Flights | None = None
    loss_scale: tuple[float, int] | None = None
    numbers: tuple[float, ...] = ()
    replica_buffers: tuple[Mapping[str, torch.Tensor], ...] = ()

    def flight_of(self, stage: int, holder: int = 0) -> StageInFlight | None:
        """Return what one holder of a stage had in flight: where one makes the updates of all, what that one had."""
        if self.flight is None:
            return None
        own = self.flight.get((stage, holder))
        return own or next(flight for (of, _), flight in self.flight.items() if of == stage)

    @property
    def every_buffers(self) -> list[Mapping[str, torch.Tensor]]:
        """The buffers of every replica that has its own."""
        return [self.buffers, *({**self.buffers, **own} for own in self.replica_buffers)]

    def buffers_of(self, replica: int) -> Mapping[str, torch.Tensor]:
        """Return the buffers of a replica: its own, or else those of the first."""
        every = self.every_buffers
        return every[replica] if replica < len(every) else self.buffers
