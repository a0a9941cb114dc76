"""The gradients of one batch on one stage, micro-batch by micro-batch, and clipped as the plan says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch

from roundelay.ir.clip import EPSILON, Clip
from roundelay.ir.micro_batch import MicroBatch

Tensors = dict[str, torch.Tensor]


@final
class Gradients:
    """Sums, and what divides them.

    Args:
        names: of the stage's parameters, in the order in which norms are taken.
        clip: what the plan says.
        scaled: whether losses are scaled, so that sums may be no finite numbers.
        shares: whether what is counted are shares that labels left out have taken from the whole, 1; else terms.
    """

    def __init__(self, names: Sequence[str], clip: Clip, *, scaled: bool = False, shares: bool = False) -> None:
        self._names, self._clip, self._scaled, self._shares = names, clip, scaled, shares
        self._sums: Tensors = {}
        self._own: set[str] = set()  # of these the sum is our own tensor, which may be added to in place
        self._count = 0.0
        self._share = 0.0  # rows summed so far of the batch's
        self.rows = 0
        """Rows of the micro-batches that are in."""

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add a micro-batch's; the first may be somebody else's too and are not written."""
        for name, gradient in gradients.items():
            if name in self._own:
                self._sums[name].add_(gradient)
            elif name in self._sums:
                self._sums[name] = torch.add(self._sums[name], gradient)
                self._own.add(name)
            else:
                self._sums[name] = gradient

    def note(self, header: MicroBatch) -> None:
        """A micro-batch's backward is done."""
        self.rows += header.rows
        self._share = self.rows / header.batch_rows

    def count(self, count: float) -> None:
        """Add the number of terms that a micro-batch's loss has summed, or the share that it lacks."""
        self._count += count

    def _over(self) -> float:
        """What divides the whole sums; 0: nothing does."""
        return 1.0 - self._count if self._shares and self._count else self._count

    def square(self) -> float:
        """The squared 2-norm of the batch's gradients, all of which must be in, as the update will get them."""
        grads = [self._sums[n] for n in self._names if n in self._sums]
        norm = float(_norm_of(grads)) if grads else 0.0
        over = self._over()
        norm = norm / over if over else norm
        return norm * norm

    def whole(self, norm: float | None) -> Tensors:
        """The batch's mean gradients, clipped, for its update.

        Args:
            norm: of the whole model's gradient, to clip by; None where the plan asks for none, or none is known.
        """
        means = {n: self._sums[n] for n in self._names if n in self._sums}
        if over := self._over():
            means = {n: torch.div(total, over) for n, total in means.items()}
        return self._clipped(means, norm)

    def begun(self) -> Tensors:
        """The mean gradients that the batch shows so far, clipped by the stage's own norm if its update will be.

        None where they are scaled and not finite, since the update will find none.
        """
        over = (self._share - self._count) or 1.0 if self._shares else self._count or self._share
        means = {n: torch.div(self._sums[n], over) for n in self._names if n in self._sums}
        if self._scaled and means and not math.isfinite(float(_norm_of(list(means.values())))):
            return {}
        return self._clipped(means, None)

    def drop(self) -> None:
        """The batch is skipped: its update finds no gradient."""
        self._sums, self._own = {}, set()

    def clear(self) -> None:
        """The next batch begins."""
        self._sums, self._own = {}, set()
        self._count = self._share = 0.0
        self.rows = 0

    def _clipped(self, grads: Tensors, norm: float | None) -> Tensors:
        """Scaled as the plan says; none is written, as others may hold it."""
        scale: torch.Tensor | float
        if self._clip.by == "stage" and grads:
            scale = torch.clamp(self._clip.norm / (_norm_of(list(grads.values())) + EPSILON), max=1.0)
        elif norm is not None:
            factor = self._clip.norm / (norm + EPSILON)
            scale = 1.0 if factor > 1.0 else factor  # what is no number stays none
        else:
            return grads
        return {name: grad * scale for name, grad in grads.items()}


def _norm_of(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their common 2-norm in single precision, each one's first."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
