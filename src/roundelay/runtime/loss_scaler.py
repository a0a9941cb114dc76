"""Loss scales as one stage knows them: stage 0 chooses one for every micro-batch, which carries it to all others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

from roundelay.checkpoint.in_flight import StageInFlight
from roundelay.errors import DivergedError
from roundelay.ir.loss_scale import HOPELESS, LEAST, MOST, LossScale
from roundelay.ir.micro_batch import MicroBatch


@final
class LossScaler:
    """What scale the micro-batches carry, and whether the gradients of the newest batch are finite.

    Args:
        rule: what the plan says.
        start: the scale, and the finite batches in a row behind it, where the run goes on; None at its start.
        flight: what was in flight there; None if it starts with an empty stage.
    """

    def __init__(self, rule: LossScale, start: tuple[float, int] | None, flight: StageInFlight | None) -> None:
        self._rule = rule
        self._now, self._streak = start if start is not None and rule.dynamic else (rule.first, 0)
        self._again = {} if flight is None else dict(flight.scales)  # micro-batches that are forwarded a second time
        self._carried: dict[int, float] = {}  # from the forward of a micro-batch to its backward
        self._spans: dict[int, tuple[float, float]] = {}  # on stage 0, batch: the least and the most of its scales
        #: whether the gradients of the batch whose update comes next are finite: the stage's own, or, where updates
        #: wait for it, those of all stages
        self.finite = True
        #: updates that found gradients which were not
        self.skipped = 0
        #: on stage 0, the newest batches in a row without finite gradients, and the most that the last of them carried
        self.in_a_row, self.newest = 0, 0.0

    def give(self, header: MicroBatch) -> float:
        """On stage 0, the scale that a micro-batch carries; the same when it is forwarded again."""
        scale = self._again.pop(header.g, self._now)
        if self._rule.dynamic:
            least, most = self._spans.get(header.batch, (scale, scale))
            self._spans[header.batch] = min(least, scale), max(most, scale)
        return scale

    def keep(self, header: MicroBatch, scale: float) -> None:
        """Note what has come with a micro-batch."""
        self._carried[header.g] = scale

    def of(self, g: int) -> float:
        """What a micro-batch carries; 1 where nothing is scaled."""
        return self._carried.get(g, 1.0)

    def done(self, g: int) -> float:
        """The same, for the last time: its backward is run, or the second half of it."""
        return self._carried.pop(g, 1.0)

    def finished(self, header: MicroBatch, square: float) -> None:
        """On stage 0, the squared norm of a batch's gradients on all stages is whole: the scale follows from it.

        Raises:
            DivergedError: it is not finite, however little the loss was scaled, or for long by a scale that stays.
        """
        finite = math.isfinite(square)
        least, most = self._spans.pop(header.batch, (self._rule.first,) * 2)
        self.in_a_row, self.newest = 0 if finite else self.in_a_row + 1, most
        if not self._rule.dynamic:
            if self._rule.on and self.in_a_row == HOPELESS:
                raise _hopeless(header, most)
            return
        if not finite:  # what the batches behind it carry may be less already
            self._now, self._streak = min(self._now, most / 2), 0
            if self._now < LEAST:
                raise _diverged(header)
        elif least == self._now == most:
            self._streak += 1
            if self._streak == self._rule.count:
                self._now, self._streak = min(2 * self._now, MOST), 0

    @property
    def state(self) -> tuple[float, int] | None:
        """On stage 0, what a run needs to go on with the same scale; None where it does not change."""
        return (self._now, self._streak) if self._rule.dynamic else None

    def in_flight(self, flight: StageInFlight) -> StageInFlight:
        """With what the micro-batches in flight carry."""
        return replace(flight, scales=dict(self._carried))


def _diverged(header: MicroBatch) -> DivergedError:
    return DivergedError(
        f"the gradients of batch {header.batch}",
        got=f"no finite numbers, with the loss scaled down to {LEAST:g}",
        expected="finite ones as soon as the scale is small enough",
        remedy="Lower the learning rate, look at this batch, or give --precision bf16.",
    )


def _hopeless(header: MicroBatch, scale: float) -> DivergedError:
    return DivergedError(
        f"the gradients of batch {header.batch}",
        got=f"no finite numbers in the {HOPELESS} batches up to it, with the loss scaled by {scale:g}",
        expected="finite ones: updates are skipped without them, and this scale stays what it is",
        remedy="Give --loss-scale dynamic, or a smaller one; if that does not help, look at these batches.",
    )
