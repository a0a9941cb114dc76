"""The header of a micro-batch: what every stage must know of it. It travels with the tensors as integers."""

from __future__ import annotations

from typing import NamedTuple, final


@final
class MicroBatch(NamedTuple):
    """One micro-batch; a tuple, as every worker makes and sends several of them for each.

    Args:
        g: its global number.
        batch: t, the number of its batch; the update that it feeds is number t.
        index: its place in the batch.
        count: micro-batches in the batch.
        rows: its rows.
        batch_rows: rows of the whole batch.
        epoch: number of the epoch, from 0.
        ends_epoch: whether its batch is the last of the epoch (1) or not (0).
        final: whether it is the last micro-batch of the run (1) or not (0).
        entry: updates that stage 0 had seen when it ran the forward.
        saved: whether a checkpoint is due behind its batch's update (1) or not (0).
    """

    g: int
    batch: int
    index: int  # type: ignore[assignment]  # a tuple's method of that name has no use here
    count: int  # type: ignore[assignment]
    rows: int
    batch_rows: int
    epoch: int
    ends_epoch: int
    final: int
    entry: int = 0
    saved: int = 0

    @property
    def ends_batch(self) -> bool:
        """Whether the update follows its backward."""
        return self.index + 1 == self.count

    @property
    def weight(self) -> float:
        """Its share of the batch's mean loss: rows over the batch's rows."""
        return self.rows / self.batch_rows

    def numbers(self) -> tuple[int, ...]:
        """As integers, for a message's header."""
        return tuple(self)

    @staticmethod
    def of(numbers: tuple[int, ...]) -> MicroBatch:
        """From a message's header."""
        return MicroBatch(*numbers)


def stream(counts: list[int], *, rows: int = 1, start_g: int = 0, start_batch: int = 0) -> list[MicroBatch]:
    """Headers of a run whose t-th batch has ``counts[t]`` micro-batches of ``rows`` rows, in one epoch."""
    made = []
    g = start_g
    for t, count in enumerate(counts):
        last = int(t + 1 == len(counts))
        for i in range(count):
            final = int(last and i + 1 == count)
            made.append(MicroBatch(g, start_batch + t, i, count, rows, rows * count, 0, last, final))
            g += 1
    return made


class Load(NamedTuple):
    """One batch as a reader has loaded it into a register.

    Args:
        worker: the worker that the reader reads for.
        batch: t, the number of the batch.
        start_s: when the reader began, in seconds of the clock that the worker's instructions are told in.
        end_s: when the register was full.
    """

    worker: int
    batch: int
    start_s: float
    end_s: float
