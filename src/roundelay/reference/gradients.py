"""Norms of gradients and the loss scale, in the arithmetic that docs/update-rules.md specifies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

import torch

from roundelay.ir.clip import EPSILON, Clip
from roundelay.ir.loss_scale import MOST, LossScale


def norm_of(gradients: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients together, as :func:`joint_norm`; 0 if there is none."""
    each = list(gradients)
    return float(joint_norm(each)) if each else 0.0


def joint_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of the norms of gradients: in single precision, or in double precision if some have that."""
    real = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
    doubles = any(gradient.dtype == torch.float64 for gradient in real)
    dtype = torch.float64 if doubles else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=dtype) for g in real]))
    return norm


def clipped(gradients: dict[str, torch.Tensor], clip: Clip) -> dict[str, torch.Tensor]:
    """Return a stage's gradients, of which there are some, times min(1, bound / (their norm + epsilon))."""
    factor = torch.clamp(clip.norm / (joint_norm(list(gradients.values())) + EPSILON), max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}


def whole_norm(stage_norms: Sequence[float]) -> float:
    """Return the norm of the whole model's gradient; the stages' squares are added from the last stage to the first."""
    squares = 0.0
    for norm in reversed(stage_norms):
        squares = squares + norm * norm
    return math.sqrt(squares)


@final
class ScaleTable:
    """(S, n) after every batch: the loss scale, and the finite batches in a row.

    Args:
        rule: how losses are scaled.
        start: (S, n) at the start of a resumed run; None at the first batch.
        batch: the first batch of the run.
    """

    def __init__(self, rule: LossScale, start: tuple[float, int] | None, batch: int) -> None:
        self._rule = rule
        self._after = {batch - 1: start if rule.dynamic and start else (rule.first, 0)}
        self._carried: list[float] = []  # scales of the batch's micro-batches so far

    def enter(self, newest: int) -> float:
        """Return the scale of a micro-batch that enters when stage 0 has finished batch ``newest``; 1 if off."""
        scale = self._after[newest][0] if self._rule.on else 1.0
        self._carried.append(scale)
        return scale

    def end(self, batch: int, finite: bool) -> None:
        """Record that all backwards of a batch are done, and whether its gradients on all stages are finite."""
        scale, streak = self._after[batch - 1]
        if self._rule.dynamic and not finite:
            scale, streak = min(scale, max(self._carried) / 2), 0
        elif self._rule.dynamic and set(self._carried) == {scale}:
            scale, streak = (min(2 * scale, MOST), 0) if streak + 1 == self._rule.count else (scale, streak + 1)
        self._after[batch] = scale, streak
        self._carried = []

    def last(self) -> tuple[float, int] | None:
        """Return (S, n) after the last batch; None if the scale does not change."""
        return self._after[max(self._after)] if self._rule.dynamic else None
