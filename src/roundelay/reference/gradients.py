"""Norms of gradients, in the arithmetic that the rules fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

import torch

from roundelay.ir.loss_scale import MOST, LossScale


def norm_of(gradients: Iterable[torch.Tensor]) -> float:
    """Their common norm: of each one's norm, in single precision; 0 of none."""
    each = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(each))) if each else 0.0


def whole_norm(lengths: Sequence[float]) -> float:
    """The norm of the whole from those of the stages, whose squares are added from the last one to the first."""
    squares = 0.0
    for length in reversed(lengths):
        squares = squares + length * length
    return math.sqrt(squares)


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
