"""The loss scale of half precision: chosen on stage 0 for every micro-batch, whose header carries it."""

from __future__ import annotations

import math
from typing import final

from roundelay.errors import DivergedError
from roundelay.ir.loss_scale import HOPELESS, LEAST, MOST, LossScale
from roundelay.ir.micro_batch import MicroBatch


@final
class LossScaler:
    """Chooses the loss scale of every micro-batch, on stage 0.

    Args:
        rule: loss scale of the plan.
        start: where the run resumes, the scale and the finite batches in a row so far; None at its start.
    """

    def __init__(self, rule: LossScale, start: tuple[float, int] | None) -> None:
        self._rule = rule
        self._now, self._streak = start if start is not None and rule.dynamic else (rule.first, 0)
        self._spans: dict[int, tuple[float, float]] = {}  # batch: the smallest and the largest of its scales
        #: the newest batches in a row without finite gradients, and the largest scale in the last of them
        self.in_a_row, self.newest = 0, 0.0

    def give(self, header: MicroBatch, before: float | None = None) -> float:
        """The scale of a micro-batch.

        Args:
            header: of the micro-batch.
            before: the scale that it had already, if its forward is redone after a resume.
        """
        scale = self._now if before is None else before
        if self._rule.dynamic:
            least, most = self._spans.get(header.batch, (scale, scale))
            self._spans[header.batch] = min(least, scale), max(most, scale)
        return scale

    def finished(self, header: MicroBatch, square: float) -> None:
        """Update the scale when the squared norm of a batch's gradients on all stages is complete.

        Raises:
            DivergedError: it is not finite even at the smallest scale, or not for many batches at a constant scale.
        """
        finite = math.isfinite(square)
        least, most = self._spans.pop(header.batch, (self._rule.first,) * 2)
        self.in_a_row, self.newest = 0 if finite else self.in_a_row + 1, most
        if not self._rule.dynamic:
            if self._rule.on and self.in_a_row == HOPELESS:
                raise _hopeless(header, most)
            return
        if not finite:  # later batches may carry a smaller scale already
            self._now, self._streak = min(self._now, most / 2), 0
            if self._now < LEAST:
                raise _diverged(header)
        elif least == self._now == most:
            self._streak += 1
            if self._streak == self._rule.count:
                self._now, self._streak = min(2 * self._now, MOST), 0

    @property
    def state(self) -> tuple[float, int] | None:
        """What a run needs to resume with the same scale; None where it does not change."""
        return (self._now, self._streak) if self._rule.dynamic else None


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
