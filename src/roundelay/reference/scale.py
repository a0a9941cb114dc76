"""The loss scale, batch by batch: a second time, from its rule.

Let c(g) be the scale that micro-batch g carries. With (S, n) what is known behind batch t−1, batch t makes of it

- (min(S, max c / 2), 0) if a gradient of t on any stage is not finite, the maximum taken over t's micro-batches;
- (S, n + 1) if all are, and c(g) = S for all of them; (min(2 S, MOST), 0) instead if n + 1 is the count;
- (S, n) else.

c(g) is the S behind the batch that stage 0 had finished last when it ran the forward of g.
"""

from __future__ import annotations

from typing import final

from roundelay.ir.loss_scale import MOST, LossScale


@final
class ScaleTable:
    """(S, n) behind every batch.

    Args:
        rule: of the scale.
        start: (S, n) where the run starts, if it does not start at the first batch.
        batch: the first batch of the run.
    """

    def __init__(self, rule: LossScale, start: tuple[float, int] | None, batch: int) -> None:
        self._rule = rule
        self._behind = {batch - 1: start if rule.dynamic and start else (rule.first, 0)}
        self._carried: list[float] = []  # by the batch's micro-batches so far

    def enter(self, newest: int) -> float:
        """The scale of a micro-batch that enters when stage 0 has finished batch ``newest``; 1 if there is none."""
        scale = self._behind[newest][0] if self._rule.on else 1.0
        self._carried.append(scale)
        return scale

    def end(self, batch: int, finite: bool) -> None:
        """All backwards of a batch are done, and its gradients on all stages finite or not."""
        scale, streak = self._behind[batch - 1]
        if self._rule.dynamic and not finite:
            scale, streak = min(scale, max(self._carried) / 2), 0
        elif self._rule.dynamic and set(self._carried) == {scale}:
            scale, streak = (min(2 * scale, MOST), 0) if streak + 1 == self._rule.count else (scale, streak + 1)
        self._behind[batch] = scale, streak
        self._carried = []

    def last(self) -> tuple[float, int] | None:
        """(S, n) behind the last batch; None if the scale does not change."""
        return self._behind[max(self._behind)] if self._rule.dynamic else None
