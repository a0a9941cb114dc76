"""The header of a micro-batch: what every stage must know about it. It travels with the tensors, as integers."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple, final

_NO_NORM = -1  # no norm has these bits, as none is negative


@final
class MicroBatch(NamedTuple):
    """One micro-batch. A tuple, because every worker creates and sends several of them per micro-batch.

    Args:
        g: its number among those of its replica.
        batch: t, the number of its batch; the update that it feeds is number t.
        index: its place in the replica's part of the batch.
        count: micro-batches in that part.
        rows: its rows; 0 where a batch has fewer parts than there are replicas: then nothing is computed.
        batch_rows: rows of the whole batch.
        epoch: number of the epoch, from 0.
        ends_epoch: whether its batch is the last of the epoch (1) or not (0).
        final: whether its batch is the last of the run (1) or not (0).
        entry: updates that stage 0 had seen when it ran the forward.
        saved: whether a checkpoint is due after its batch's update (1) or not (0).
        scale_log2: base-2 logarithm of its loss scale, which stage 0 chooses; 0 where losses are not scaled.
        norm_bits: the newest norm of the whole model's gradient that stage 0 knew, as the bits of a double; -1 if none.
        replica: the replica that computes it.
        replicas: of how many; each has the same number of micro-batches of a batch, some of which may have no rows.
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
    scale_log2: int = 0
    norm_bits: int = _NO_NORM
    replica: int = 0
    replicas: int = 1

    @property
    def number(self) -> int:
        """Its number among those of all replicas, which take turns in the order of the rows."""
        return self.g * self.replicas + self.replica

    @property
    def ends_batch(self) -> bool:
        """Whether the update follows its backward."""
        return self.index + 1 == self.count

    @property
    def end(self) -> int:
        """The number of its batch's last micro-batch."""
        return self.g + self.count - 1 - self.index

    @property
    def whole(self) -> bool:
        """Whether it has all rows of its batch."""
        return self.rows == self.batch_rows

    @property
    def weight(self) -> float:
        """Its share of the batch's mean loss: rows over the batch's rows."""
        return self.rows / self.batch_rows

    @property
    def loss_scale(self) -> float:
        """What its loss is multiplied by before the backward: a power of two."""
        return math.ldexp(1.0, self.scale_log2)

    @property
    def grad_norm(self) -> float | None:
        """The newest norm of the whole model's gradient that stage 0 knew when it read the micro-batch."""
        return None if self.norm_bits == _NO_NORM else float(struct.unpack("<d", struct.pack("<q", self.norm_bits))[0])

    def carrying(self, loss_scale: float, grad_norm: float | None) -> MicroBatch:
        """The same header with the numbers that stage 0 attaches to it."""
        bits = _NO_NORM if grad_norm is None else struct.unpack("<q", struct.pack("<d", grad_norm))[0]
        return self._replace(scale_log2=math.frexp(loss_scale)[1] - 1, norm_bits=bits)

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
            made.append(MicroBatch(g, start_batch + t, i, count, rows, rows * count, 0, last, last))
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
