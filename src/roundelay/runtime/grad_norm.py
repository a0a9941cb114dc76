"""What stage 0 attaches to every micro-batch: the loss scale, and the newest norm of the whole model's gradient.

Each stage sends the squared norm of its gradients to stage 0 (instruction ``grad-norm-sq``). Stage 0 adds them up, and
the headers of the micro-batches that it reads from then on carry the result to all stages.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

from roundelay.checkpoint.in_flight_state import StageInFlight
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.loss_scaler import LossScaler


@final
class GradNorms:
    """On stage 0: norms of the whole model's gradient, and the loss scale that depends on them.

    Args:
        scaler: chooses the loss scale; None if losses are not scaled.
        start: what was in flight where the run resumes; None if the stages start empty.
    """

    def __init__(self, scaler: LossScaler | None, start: StageInFlight | None) -> None:
        self.scaler = scaler
        #: norm of the last batch that stage 0 has finished; 0 before the first
        self.whole = 0.0
        #: norm of the newest batch that stage 0 has finished and that was not skipped; None before the first
        self.newest = None if start is None else start.newest
        self._redone = {} if start is None else {g: (start.scales.get(g), n) for g, n in start.norms.items()}
        self._in_flight: dict[int, tuple[float, float | None]] = {}

    def attach(self, header: MicroBatch) -> MicroBatch:
        """The header with scale and norm; those of the first time if its forward is redone after a resume."""
        scale, norm = self._redone.pop(header.g, (None, self.newest))
        if self.scaler is not None:
            scale = self.scaler.give(header, scale)
        self._in_flight[header.g] = scale or 1.0, norm
        return header.carrying(scale or 1.0, norm)

    def finished(self, header: MicroBatch, square: float) -> None:
        """The squared norm of a batch is complete.

        Raises:
            DivergedError: see :meth:`LossScaler.finished`.
        """
        self._in_flight = {g: numbers for g, numbers in self._in_flight.items() if g > header.g}
        self.whole = math.sqrt(square)
        if math.isfinite(self.whole) or self.scaler is None:
            self.newest = self.whole
        if self.scaler is not None:
            self.scaler.finished(header, square)

    def in_flight(self, flight: StageInFlight) -> StageInFlight:
        """``flight`` with the numbers of the micro-batches that are in flight."""
        return replace(
            flight,
            norms={g: norm for g, (_, norm) in self._in_flight.items()},
            scales={g: scale for g, (scale, _) in self._in_flight.items()},
            newest=self.newest,
        )
