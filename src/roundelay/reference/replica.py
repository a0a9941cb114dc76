"""What one replica has of its own: its buffers, and the sums over its micro-batches of a batch.

Where holders take a stage's micro-batches in turns, a replica is one of these holders.
"""

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
        #: those of the last micro-batch that are to be summed over the replicas
        self.made: list[Tensors] = [{} for _ in range(self.workers)]
        #: by stage: terms that the losses have summed; weight in the batch's mean that ignored labels would have had
        self.counts: dict[int, float] = {}
        self.missing: dict[int, float] = {}
        self._rows = 0

    def add(self, each: Sequence[Tensors], made: frozenset[str] = frozenset()) -> None:
        """Add a micro-batch's gradients of one stage's parameters, of every worker; keep those that are ``made``."""
        for totals, apart, gradients in zip(self.gradients, self.made, each, strict=True):
            for name, gradient in gradients.items():
                if name in made:
                    apart[name] = gradient
                else:
                    totals[name] = totals[name] + gradient if name in totals else gradient

    def note(self, done: int, header: MicroBatch) -> None:
        """Record the sums as they are when ``done`` micro-batches are done, of which this one is the last."""
        self._rows += header.rows
        weight = self._rows / header.batch_rows - self.missing.get(0, 0.0)
        self.begun[done] = dict(self.gradients[0]), self.counts.get(0) or weight or 1.0


def add_made(replicas: Sequence[Replica]) -> None:
    """Sum a micro-batch's gradients that are made over the replicas, and add them to the sums of the first."""
    for worker, totals in enumerate(replicas[0].gradients):
        for name in dict.fromkeys(name for replica in replicas for name in replica.made[worker]):
            made = _summed(replica.made[worker].pop(name, None) for replica in replicas)
            totals[name] = _summed([totals.get(name), made])  # type: ignore[assignment]  # one has it


def in_order(replicas: Sequence[Replica], stage: ReferenceStage, batch_end: int) -> Sequence[Replica]:
    """The replicas in the order in which a batch's sums of a stage are added.

    Where holders take turns, it is that of their last micro-batches of the batch (Cyclic Data Parallelism, Sect. 4.3).

    Args:
        replicas: all.
        stage: has the turns.
        batch_end: the number of the batch's last micro-batch.
    """
    if not stage.turns:
        return replicas
    lasts = range(batch_end - stage.turns + 1, batch_end + 1)
    return [replicas[g % stage.turns] for g in lasts]


def total_gradients(
    replicas: Sequence[Replica], stages: Sequence[ReferenceStage], batch_end: int, shards: int
) -> Tensors:
    """Return the sums over all replicas, added in their order; they are contiguous where there are several.

    Those of which each replica gets a part are summed over groups of ``shards`` replicas first.
    """
    every = {replica.number: whole_gradients(stages, replica.gradients) for replica in replicas}
    if len(replicas) == 1:
        return every[0]
    totals: Tensors = {}
    for stage in stages:
        ordered = in_order(replicas, stage, batch_end)
        for name in stage.parameters:
            size = shards if name in stage.states else len(ordered)
            groups = [ordered[first : first + size] for first in range(0, len(ordered), size)]
            sums = [_summed(every[replica.number].get(name) for replica in group) for group in groups]
            if (total := _summed(sums)) is not None:
                totals[name] = total
    return {name: total.clone(memory_format=torch.contiguous_format) for name, total in totals.items()}


def total_divisor(replicas: Sequence[Replica], stage: int) -> float | None:
    """Return what divides a stage's sums: summed terms of the losses, or the weight without ignored labels.

    Args:
        replicas: in the order in which their sums are added.
        stage: its number.
    """
    missing = _added(replica.missing[stage] for replica in replicas if stage in replica.missing)
    if missing:
        return 1.0 - missing
    counts = [replica.counts[stage] for replica in replicas if stage in replica.counts]
    return _added(counts) if counts else None


def _summed(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of those that there are, in their order."""
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _added(numbers: Iterable[float]) -> float:
    total = 0.0
    for number in numbers:
        total = total + number
    return total
