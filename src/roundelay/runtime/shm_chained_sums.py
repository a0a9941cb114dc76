"""Sums that the holders of a stage hand on one after another, in memory that they share: messages say where they lie.

The memory has :data:`BLOCKS` blocks, which the batches use in turn. The first holder puts its gradients into a block,
the others add theirs in place, and all update from the total there: nothing is copied.

Nobody writes a block that another still reads. When a holder adds its gradients of batch t, it has updated from batch
t - 2 (``lower/verify_schedule.py`` checks that). So one that writes the block of batch t has updated from batch t - 2,
whose sum had everyone's gradients; and everyone had by then updated from batch t - 4, the block's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.work import Work
from roundelay.runtime.collectives import Parts
from roundelay.runtime.shm_allreduce import block_of, bytes_of_block

BLOCKS = 4


def sum_bytes(works: Sequence[Work]) -> dict[int, int]:
    """Bytes of the memory of every stage's sums, by the channel by which :meth:`Endpoint.shared` knows it."""
    summed = [own for work in works for own in work.stages if own.sums >= 0]
    return {own.sums: BLOCKS * bytes_of_block(own.summed) for own in summed}


@final
class SumBlocks:
    """The blocks of one stage.

    Args:
        memory: that the holders share.
        exchange: what is summed.
    """

    def __init__(self, memory: torch.Tensor, exchange: ExchangePlan) -> None:
        #: bytes of a sum
        self.num_bytes = exchange.num_bytes
        self._blocks = [block_of(memory, exchange, number) for number in range(BLOCKS)]
        self._numbers = {_place(block): number for number, block in enumerate(self._blocks)}

    def __getitem__(self, number: int) -> Parts:
        """A block by its number."""
        return self._blocks[number]

    def of_batch(self, batch: int) -> Parts:
        """The block of a batch."""
        return self._blocks[batch % BLOCKS]

    def find(self, parts: Parts) -> int | None:
        """The number of the block that these tensors are; None if they lie elsewhere."""
        return self._numbers.get(_place(parts)) if parts else None


def _place(parts: Parts) -> int:
    """The address of what the losses have counted, which stands last and is never empty."""
    return parts[-1].data_ptr()
