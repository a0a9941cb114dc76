"""What Ravnest's analysis assumes to be bounded (Sect. 3.4), as numbers of a run: of gradients and of delays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from roundelay.observe.trace import Span

Gradient = Callable[[Tensor], Tensor]
"""From weights, as one row of numbers, to the gradient of the loss over all data."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Gradients for batches beside that of all data, at fixed weights.

    Args:
        bias: norm of their mean's difference from it.
        variance: mean of the squared norms of their differences from it.
        largest: of their norms.
    """

    bias: float
    variance: float
    largest: float


def spread_of(full: Tensor, batches: Iterable[Tensor]) -> Spread:
    """How gradients for batches lie around the gradient of all data.

    Args:
        full: gradient of all data, one row of numbers.
        batches: gradients for batches of equal size, of the same shape.
    """
    total, squares, largest, count = torch.zeros_like(full), 0.0, 0.0, 0
    for own in batches:
        total += own
        squares += float(((own - full) ** 2).sum())
        largest = max(largest, float(own.norm()))
        count += 1
    return Spread(float((total / count - full).norm()), squares / count, largest)


def lipschitz(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[float]:
    """From each point to the next: by how much the gradient changes, divided by how much the weights do.

    The greatest of all such ratios is the Lipschitz constant; those of some points are not above it.
    """
    return [
        float((b - a).norm() / (y - x).norm())
        for (x, y), (a, b) in zip(pairwise(weights), pairwise(gradients), strict=True)
    ]


def block_lipschitz(gradient: Gradient, start: Tensor, end: Tensor, block: Tensor) -> float:
    """The same of one block of weights, if only that block goes from ``start`` to ``end``.

    Args:
        gradient: of all data.
        start: weights, one row of numbers.
        end: weights, of the same shape.
        block: true where a weight belongs to the block, of the same shape.
    """
    changed = gradient(torch.where(block, end, start)) - gradient(start)
    return float(changed[block].norm() / (end - start)[block].norm())


def most_in_flight(letters: str) -> int:
    """Most forwards without their backward at one time, by a stage's letters."""
    most = now = 0
    for letter in letters:
        now += 1 if letter == "F" else -1
        most = max(most, now)
    return most


def global_delays(spans: Sequence[Span], stages: int) -> list[list[int]]:
    """For each stage, the updates of all stages between the beginning of each forward and its own update.

    It is the delay in Eq. (4)'s k, which counts the updates of all stages; the update itself is not counted.

    Args:
        spans: of a run with one clock and one micro-batch for each update.
        stages: how many there are.
    """
    ends = sorted(span.end_s for span in spans if span.opcode == "update")
    begun = {(span.stage, span.g): span.start_s for span in spans if span.opcode == "forward"}
    found: list[list[int]] = [[] for _ in range(stages)]
    for span in spans:
        if span.opcode == "update" and (start := begun.get((span.stage, span.g))) is not None:
            found[span.stage].append(bisect_right(ends, span.end_s) - 1 - bisect_right(ends, start))
    return found
