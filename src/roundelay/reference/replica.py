"""What one replica has of its own: its buffers, and the sums over its micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch

from roundelay.ir.micro_batch import MicroBatch
from roundelay.reference.mesh import whole_gradients
from roundelay.reference.run_inputs import ReferenceStage, Tensors


@final
class Replica:
    """One replica.

    Args:
        number: r.
        buffers: by name; replaced, not modified.
        workers: of the mesh, each of which sums gradients of its own.
    """

    def __init__(self, number: int, buffers: Tensors, workers: int = 1) -> None:
        self.number, self.buffers, self.workers = number, dict(buffers), workers
        #: by micro-batches done: sums of gradients, and their divisor
        self.begun: dict[int, tuple[Tensors, float]] = {}
        self.begin_batch()

    def begin_batch(self) -> None:
        """Forget the sums of the batch before."""
        self.gradients: list[Tensors] = [{} for _ in range(self.workers)]
        self.count: float | None = None
        self.missing = 0.0  # weight in the batch's mean that ignored labels would have had
        self._rows = 0

    def add(self, each: Sequence[Tensors]) -> None:
        """Add a micro-batch's gradients of one stage's parameters, of every worker."""
        for totals, gradients in zip(self.gradients, each, strict=True):
            for name, gradient in gradients.items():
                total = totals.get(name)
                totals[name] = gradient if total is None else total + gradient

    def note(self, done: int, header: MicroBatch) -> None:
        """Record the sums as they are when ``done`` micro-batches are done, of which this one is the last."""
        self._rows += header.rows
        weight = self._rows / header.batch_rows - self.missing
        self.begun[done] = dict(self.gradients[0]), self.count or weight or 1.0


def total_gradients(replicas: Sequence[Replica], stages: Sequence[ReferenceStage]) -> Tensors:
    """Return the sums over all replicas, added in their order; they are contiguous where there are several."""
    each = [whole_gradients(stages, replica.gradients) for replica in replicas]
    if len(replicas) == 1:
        return each[0]
    totals: Tensors = {}
    for gradients in each:
        for name, gradient in gradients.items():
            totals[name] = totals[name] + gradient if name in totals else gradient
    return {name: total.clone(memory_format=torch.contiguous_format) for name, total in totals.items()}


def total_count(replicas: Sequence[Replica]) -> float | None:
    """Return the number of terms that the losses have summed, over all replicas in their order; None if not counted."""
    counts = [replica.count for replica in replicas if replica.count is not None]
    return _added(counts) if counts else None


def total_missing(replicas: Sequence[Replica]) -> float:
    """Return the weight that ignored labels would have had, over all replicas in their order."""
    return _added(replica.missing for replica in replicas)


def _added(numbers: Iterable[float]) -> float:
    total = 0.0
    for number in numbers:
        total = total + number
    return total
