"""The data, read by one worker: epochs and batches of the person's loader as a stream of micro-batches.

The reader looks one batch ahead within the epoch, so that every micro-batch knows whether its batch ends the epoch and
whether it is the run's last. The loader draws from random states of its own, seeded by (seed, epoch): what it yields
depends on nothing else that happens in the process, and a run continued at an epoch's start sees the same data.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, final

import torch

from roundelay.errors import JobError
from roundelay.frontend.batch import copied, num_rows, part_rows, split
from roundelay.ir.micro_batch import MicroBatch
from roundelay.job import Batches
from roundelay.runtime.loader_epoch import Generators, OpenEpoch, taken
from roundelay.runtime.prefetch import Registers, prefetch


@dataclass(frozen=True, slots=True)
class Extent:
    """From where to where a run goes.

    Args:
        start_g: number of the first micro-batch.
        start_batch: number of the first batch.
        start_epoch: epoch in which it starts.
        skip: batches of that epoch that were used before.
        batches: how many batches to make, or None.
        epochs: up to which epoch (exclusive), or None.
        save_every: updates from one checkpoint to the next, counted from the first update of all, besides one at every
            epoch's end; 0: only those; None: there are none.
    """

    start_g: int = 0
    start_batch: int = 0
    start_epoch: int = 0
    skip: int = 0
    batches: int | None = None
    epochs: int | None = None
    save_every: int | None = None

    def saves(self, batch: int, ends_epoch: bool) -> bool:
        """Whether a checkpoint is due behind the update of this batch, which is not the run's last."""
        every = self.save_every
        return every is not None and (ends_epoch or (every > 0 and (batch + 1) % every == 0))


def read(  # noqa: PLR0913  data, from where to where, and in which parts
    batches: Batches,
    seed: int,
    micro_batches: int,
    extent: Extent,
    values: Callable[[Any], dict[str, torch.Tensor]],
    *,
    min_rows: int = 1,
    registers: Registers | None = None,
    control: RunControl | None = None,
) -> Generator[tuple[MicroBatch, dict[str, torch.Tensor]], None, None]:
    """Micro-batches with their header and the values that enter the graph.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        micro_batches: M.
        extent: from where to where.
        values: micro-batch -> tensors by value name.
        min_rows: of a micro-batch, as the graph says.
        registers: if given, a thread of its own reads ahead into them.
        control: may ask for a checkpoint, or for the end, before any batch.

    Raises:
        DeadlineError: a batch did not come in time.
        UserCodeError: the loader raises.
        JobError: a batch cannot be used, or an epoch has none.
    """
    g, t = extent.start_g, extent.start_batch
    in_line = _batches(batches, seed, extent)
    with closing(in_line if registers is None else prefetch(in_line, registers)) as source:
        for batch, epoch, ends_epoch, final in source:
            rows = num_rows(batch)
            sizes = part_rows(batch, micro_batches, min_rows)
            if control is not None and control.ending:
                final = True
            asked = control is not None and control.takes_save()
            saved = int(not final and (asked or extent.saves(t, ends_epoch)))
            for i, part in enumerate(split(batch, micro_batches, min_rows)):
                last = int(final and i + 1 == len(sizes))
                header = MicroBatch(g, t, i, len(sizes), sizes[i], rows, epoch, int(ends_epoch), last, saved=saved)
                yield header, values(part)
                g += 1
            t += 1
            if final:
                return


def _batches(batches: Batches, seed: int, extent: Extent) -> Generator[tuple[Any, int, bool, bool], None, None]:
    """(batch, epoch, it ends the epoch, it ends the run)."""
    made = 0
    for epoch, source in _epochs(batches, seed, extent):
        following = next(source, source)
        while following is not source:
            batch, made = copied(following), made + 1
            following = next(source, source)
            ends = following is source
            final = made == extent.batches or (ends and epoch + 1 == extent.epochs)
            yield batch, epoch, ends, final
            if final:
                return
    if not made:
        raise JobError(
            f"batches({extent.start_epoch})",
            got=f"no batch behind the {extent.skip} that were used before the checkpoint",
            expected="the data that the checkpoint was made with, or more --epochs",
            remedy="Continue with the same data, or train further epochs.",
        )


def _epochs(batches: Batches, seed: int, extent: Extent) -> Iterator[tuple[int, Iterator[Any]]]:
    """Every epoch and its batches, those behind which the run starts left out."""
    generators = Generators()
    epoch, skip = extent.start_epoch, extent.skip
    while extent.epochs is None or epoch < extent.epochs:
        yield epoch, itertools.islice(_epoch(batches, seed, epoch, generators), skip, None)
        epoch, skip = epoch + 1, 0


def _epoch(batches: Batches, seed: int, epoch: int, generators: Generators) -> Iterator[Any]:
    """The batches of one epoch: those that were looked at before the run, if it is the first, and the rest."""
    opened = taken(batches, seed) if epoch == 0 else None
    if opened is None:
        opened = OpenEpoch(batches, seed, epoch, generators)
    else:
        generators.follow(opened.generators)
    try:
        yield from opened.rest()
    finally:
        opened.close()


def read_batches(batches: Batches, seed: int, extent: Extent) -> Generator[Any, None, None]:
    """Whole batches as the loader gives them, without looking ahead.

    Raises:
        UserCodeError: the loader raises.
        JobError: an epoch has no batch.
    """
    every = (batch for _, source in _epochs(batches, seed, extent) for batch in source)
    yield from itertools.islice(every, extent.batches)


_NOTHING, _ASKED = 0, 1
_SAVE, _END = 0, 1


@final
class RunControl:
    """Two flags in memory that forked processes share: each is set by the launcher, and read by the reader."""

    def __init__(self) -> None:
        self._flags = mmap.mmap(-1, mmap.PAGESIZE)

    def save_soon(self) -> None:
        """Have a checkpoint made behind the update of the next batch that is read."""
        self._flags[_SAVE] = _ASKED

    def end_soon(self) -> None:
        """Make the next batch that is read the run's last."""
        self._flags[_END] = _ASKED

    @property
    def ending(self) -> bool:
        """Whether the next batch is to be the last."""
        return self._flags[_END] == _ASKED

    def takes_save(self) -> bool:
        """Whether a checkpoint was asked for and not yet taken; it counts as taken then."""
        asked = self._flags[_SAVE] == _ASKED
        if asked:
            self._flags[_SAVE] = _NOTHING
        return asked
