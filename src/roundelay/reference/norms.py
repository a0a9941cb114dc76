"""Norms of gradients, in the arithmetic that the rules fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


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
