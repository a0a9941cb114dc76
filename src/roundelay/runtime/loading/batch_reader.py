"""Turns the epochs and batches of the user's loader into a stream of micro-batches, for the one worker that reads.

The reader is one batch ahead within the epoch, so that a micro-batch's header says whether its batch ends the epoch or
the run. The loader draws from random states of its own, seeded by (seed, epoch), so that its batches depend on nothing
else that happens in the process, and a run continued at an epoch's start gets the same data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.frontend.batch import copy_batch, num_rows, part_rows, split
from roundelay.ir.micro_batch import MicroBatch
from roundelay.job import Batches
from roundelay.runtime.loading.checkpoint_schedule import Extent, RunControl
from roundelay.runtime.loading.loader_epoch import Generators, OpenEpoch, take_first_epoch
from roundelay.runtime.loading.prefetch import Registers, prefetch

Dealt = tuple[tuple[MicroBatch, dict[str, torch.Tensor]], ...]
"""One micro-batch of each replica: header, and the values that enter the graph; none if it has no rows."""


def read_micro_batches(  # noqa: PLR0913  data, from where to where, and in which parts
    batches: Batches,
    seed: int,
    micro_batches: int,
    extent: Extent,
    values: Callable[[Any], dict[str, torch.Tensor]],
    *,
    replicas: int = 1,
    min_rows: int = 1,
    padded: bool = False,
    registers: Registers | None = None,
    control: RunControl | None = None,
) -> Generator[Dealt, None, None]:
    """Yield micro-batches, one of each replica at a time: the parts of a batch are dealt out in turns.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        micro_batches: M.
        extent: start and end of the run.
        values: micro-batch -> tensors by value name.
        replicas: R.
        min_rows: minimum rows of a micro-batch, from the graph.
        padded: whether every batch has M, some of them without rows.
        registers: if given, a separate thread prefetches into them.
        control: may request a checkpoint, or the end, before any batch.

    Raises:
        DeadlineError: a batch did not come in time.
        UserCodeError: the loader raises.
        JobError: a batch cannot be used, or an epoch has none.
    """
    g, t = extent.start_g, extent.start_batch
    in_line = _batches(batches, seed, extent)
    with closing(in_line if registers is None else prefetch(in_line, registers)) as source:
        for batch, epoch, ends_epoch, final in source:
            parts = replicas * micro_batches
            sizes = part_rows(batch, parts, min_rows)
            if control is not None and control.ending:
                final = True
            saved = int(not final and _saves(extent, control, t, ends_epoch))
            count = micro_batches if padded else -(-len(sizes) // replicas)
            known = (t, 0, count, 0, num_rows(batch), epoch, int(ends_epoch), 0)
            whole = MicroBatch(g, *known, saved=saved, replicas=replicas)
            for i, dealt in enumerate(_dealt(split(batch, parts, min_rows), replicas, count)):
                header = whole._replace(g=g, index=i, final=int(final))
                yield tuple(
                    (header._replace(rows=0, replica=r), {})
                    if part is None
                    else (header._replace(rows=sizes[i * replicas + r], replica=r), values(part))
                    for r, part in enumerate(dealt)
                )
                g += 1
            t += 1
            if final:
                return


def _dealt(parts: list[Any], replicas: int, count: int) -> Iterator[tuple[Any, ...]]:
    """Yield the parts of a batch in so many rounds, with one for each replica; the last ones may lack some."""
    given = [*parts, *[None] * (replicas * count - len(parts))]
    for start in range(0, len(given), replicas):
        yield tuple(given[start : start + replicas])


def _saves(extent: Extent, control: RunControl | None, batch: int, ends_epoch: bool) -> bool:
    """Whether a checkpoint follows the update of a batch that is not the run's last."""
    if control is None:
        return extent.saves(batch, ends_epoch)
    due = extent.saves(batch, ends_epoch)
    if control.saving:
        if due:
            control.leave_out()
        return False
    saves = control.takes_save() or due
    if saves:
        control.begin_save()
    return saves


def _batches(batches: Batches, seed: int, extent: Extent) -> Generator[tuple[Any, int, bool, bool], None, None]:
    """Yield (batch, epoch, whether it ends the epoch, whether it ends the run)."""
    count = 0
    for epoch, source in _epochs(batches, seed, extent):
        following = next(source, source)
        while following is not source:
            batch, count = copy_batch(following), count + 1
            following = next(source, source)
            ends = following is source
            final = count == extent.batches or (ends and epoch + 1 == extent.epochs)
            yield batch, epoch, ends, final
            if final:
                return
    if not count:
        raise JobError(
            f"batches({extent.start_epoch})",
            got=f"no batch after the {extent.skip} that were used before the checkpoint",
            expected="the data of the run that made the checkpoint, or more --epochs",
            remedy="Continue with the same data, or train further epochs.",
        )


def _epochs(batches: Batches, seed: int, extent: Extent) -> Iterator[tuple[int, Iterator[Any]]]:
    """Yield every epoch and its batches, without those that were trained on before."""
    generators = Generators()
    epoch, skip = extent.start_epoch, extent.skip
    while extent.epochs is None or epoch < extent.epochs:
        yield epoch, itertools.islice(_epoch(batches, seed, epoch, generators), skip, None)
        epoch, skip = epoch + 1, 0


def _epoch(batches: Batches, seed: int, epoch: int, generators: Generators) -> Iterator[Any]:
    """Yield the batches of one epoch; the first epoch may be open already, and peeked at."""
    opened = take_first_epoch(batches, seed) if epoch == 0 else None
    if opened is None:
        opened = OpenEpoch(batches, seed, epoch, generators)
    else:
        generators.follow(opened.generators)
    try:
        yield from opened.rest()
    finally:
        opened.close()


def read_batches(batches: Batches, seed: int, extent: Extent) -> Generator[Any, None, None]:
    """Yield whole batches as the loader gives them, without reading ahead.

    Raises:
        UserCodeError: the loader raises.
        JobError: an epoch has no batch.
    """
    every = (batch for _, source in _epochs(batches, seed, extent) for batch in source)
    yield from itertools.islice(every, extent.batches)
