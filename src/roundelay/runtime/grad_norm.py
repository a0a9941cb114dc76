"""Norms of the whole model's gradient as one stage comes to know them, where gradients are clipped by them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

from roundelay.checkpoint.in_flight import StageInFlight
from roundelay.ir.micro_batch import MicroBatch


@final
class GradNorms:
    """Stage 0 makes them and gives the newest to every micro-batch; the others get them with these.

    Args:
        start: what was in flight where the run goes on; None if it starts with an empty stage.
        scaled: whether losses are scaled, so that a norm which is no finite number is that of a batch that is skipped.
    """

    def __init__(self, start: StageInFlight | None, *, scaled: bool = False) -> None:
        self._scaled = scaled
        #: on stage 0, that of the batch that it has finished last; 0 before the first
        self.whole = 0.0
        #: on stage 0, that of the newest batch that it has finished, and that was not skipped; None before the first
        self.newest = None if start is None else start.newest
        self._again = {} if start is None else dict(start.norms)  # micro-batches that are forwarded a second time
        self._given: dict[int, float | None] = {}  # micro-batch that may be in flight at a checkpoint: its norm
        self._of_batch: dict[int, float | None] = {}

    def give(self, header: MicroBatch) -> float | None:
        """On stage 0, the norm that goes with a micro-batch; the same when it is forwarded again."""
        norm = self._again.pop(header.g, self.newest)
        self._given[header.g] = norm
        return norm

    def keep(self, header: MicroBatch, norm: float | None) -> None:
        """Note what has come with a micro-batch: the last of a batch brings its update's."""
        if header.ends_batch:
            self._of_batch[header.batch] = norm

    def of(self, header: MicroBatch) -> float | None:
        """The norm that has come for an update, which is made now."""
        self._given = {g: norm for g, norm in self._given.items() if g > header.g}
        return self._of_batch.pop(header.batch)

    def finished(self, square: float) -> None:
        """On stage 0, the squared norm of a batch is whole."""
        self.whole = math.sqrt(square)
        if math.isfinite(self.whole) or not self._scaled:
            self.newest = self.whole

    def in_flight(self, flight: StageInFlight) -> StageInFlight:
        """With the norms that a run needs to go on from here."""
        return replace(flight, norms=dict(self._given), newest=self.newest)
