"""The data, read by one worker: epochs and batches of the person's loader as a stream of micro-batches.

The reader looks one batch ahead within the epoch, so that every micro-batch knows whether its batch ends the epoch and
whether it is the run's last. The loader draws from random states of its own, seeded by (seed, epoch): what it yields
depends on nothing else that happens in the process, and a run continued at an epoch's start sees the same data.
"""

from __future__ import annotations

import itertools
import os
import random
from asyncio import CancelledError
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roundelay.errors import JobError, RoundelayError
from roundelay.frontend.batch import num_rows, replace, split, split_rows
from roundelay.frontend.draws import DEFAULT_GENERATOR_LOCK
from roundelay.ir.micro_batch import MicroBatch
from roundelay.job import Batches
from roundelay.runtime.ahead import Registers, ahead, hold_up, note
from roundelay.runtime.explain import loading_failed


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


class Generators:
    """The loader's own states of torch's, numpy's and Python's generators, swapped in while it runs."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any, Any] | None = None

    def seed(self, seed: int, epoch: int) -> None:
        """Start an epoch."""
        with self.active():
            seed_everything(seed * 1_000_003 + epoch)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run on the loader's states; the process's own come back afterwards."""
        hold_up(True)
        with DEFAULT_GENERATOR_LOCK:
            hold_up(False)
            outside = _states()
            if self._states is not None:
                _set_states(self._states)
            try:
                yield
            finally:
                self._states = _states()
                _set_states(outside)


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random."""
    torch.manual_seed(seed & (2**63 - 1))
    np.random.seed(seed & (2**32 - 1))
    random.seed(seed)


def _states() -> tuple[Any, Any, Any]:
    return torch.random.get_rng_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.random.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def read(
    batches: Batches,
    seed: int,
    micro_batches: int,
    extent: Extent,
    values: Callable[[Any], dict[str, torch.Tensor]],
    *,
    registers: Registers | None = None,
) -> Generator[tuple[MicroBatch, dict[str, torch.Tensor]], None, None]:
    """Micro-batches with their header and the values that enter the graph.

    Args:
        batches: the job's loader.
        seed: the run's seed.
        micro_batches: M.
        extent: from where to where.
        values: micro-batch -> tensors by value name.
        registers: if given, a thread of its own reads ahead into them.

    Raises:
        DeadlineError: a batch did not come in time.
        UserCodeError: the loader raises.
        JobError: a batch cannot be used, or an epoch has none.
    """
    g, t = extent.start_g, extent.start_batch
    in_line = _batches(batches, seed, extent)
    with closing(in_line if registers is None else ahead(in_line, registers)) as source:
        for batch, epoch, ends_epoch, final in source:
            rows = num_rows(batch)
            sizes = split_rows(rows, micro_batches)
            saved = int(not final and extent.saves(t, ends_epoch))
            for i, part in enumerate(split(batch, micro_batches)):
                last = int(final and i + 1 == len(sizes))
                header = MicroBatch(g, t, i, len(sizes), sizes[i], rows, epoch, int(ends_epoch), last, saved=saved)
                yield header, values(part)
                g += 1
            t += 1


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


def copied(batch: Any) -> Any:
    """A loader may fill its own tensors and arrays again when it is asked for the next batch."""
    return replace(
        batch, lambda _, leaf: leaf.clone(), lambda _, leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    )


def _epochs(batches: Batches, seed: int, extent: Extent) -> Iterator[tuple[int, Iterator[Any]]]:
    """Every epoch and its batches, those behind which the run starts left out."""
    generators = Generators()
    epoch, skip = extent.start_epoch, extent.skip
    while extent.epochs is None or epoch < extent.epochs:
        yield epoch, itertools.islice(_epoch(batches, seed, epoch, generators), skip, None)
        epoch, skip = epoch + 1, 0


def _epoch(batches: Batches, seed: int, epoch: int, generators: Generators) -> Iterator[Any]:
    """The batches of one epoch."""
    generators.seed(seed, epoch)
    with user_code(f"batches({epoch})"), generators.active():
        source = batches(epoch)
        _leave_to_parent(source)
        _start_processes(source, seed * 1_000_003 + epoch)
        _seed_own_generators(source, seed * 1_000_003 + epoch)
        iterator = iter(source)
    try:
        for number in itertools.count():
            with user_code(f"batch {number} of batches({epoch})", iterator), generators.active():
                batch = next(iterator, iterator)
            if batch is not iterator:
                yield batch
            elif number:
                return
            else:
                raise JobError(
                    f"batches({epoch})",
                    got="no batch",
                    expected="at least one batch in every epoch",
                    remedy="Check the data set's size, and drop_last of the loader.",
                )
    finally:
        _end_processes(source, iterator)


def _end_processes(source: Any, iterator: Any) -> None:
    """End a DataLoader's processes with its iterator, which an error may keep for as long as somebody looks at it."""
    if hasattr(iterator, "_shutdown_workers") and not getattr(source, "persistent_workers", False):
        iterator._shutdown_workers()


def _leave_to_parent(source: Any) -> None:
    """A DataLoader with persistent processes that this process's parent has started gets some of this process's own.

    The parent may go on with its own, so that they are neither asked nor ended here.
    """
    iterator = getattr(source, "_iterator", None)
    started = {getattr(process, "_parent_pid", os.getpid()) for process in getattr(iterator, "_workers", ())}
    if started - {os.getpid()}:
        _INHERITED.append(iterator)
        source._iterator = None


def _start_processes(source: Any, seed: int) -> None:
    """Start a DataLoader's persistent processes apart from its first epoch, whose order they would change.

    To start them draws a number, which a loader that has them does not draw again.
    """
    if getattr(source, "persistent_workers", False):
        if getattr(source, "_iterator", None) is None:
            iter(source)
        seed_everything(seed)


_INHERITED: list[Any] = []
"""Iterators of a parent process, kept because they end its processes when they are dropped."""


def _seed_own_generators(source: Any, seed: int) -> None:
    """Seed the generators that a DataLoader and its samplers hold themselves, as the process-wide ones are."""
    batch_sampler = getattr(source, "batch_sampler", None)
    holders = (source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed & (2**63 - 1))


@contextmanager
def user_code(what: str, iterator: Any = None) -> Iterator[None]:
    """Run what belongs to the person's loader.

    Args:
        what: what it is asked for.
        iterator: what is asked; a DataLoader's may have processes.

    Raises:
        UserCodeError: it raises.
    """
    processes = getattr(iterator, "_workers", ())
    note(what, processes)
    try:
        yield
    except RoundelayError:
        raise
    except (Exception, SystemExit, CancelledError) as error:  # the person's own loader; not Ctrl-C
        raise loading_failed(what, error, processes) from error


def read_batches(batches: Batches, seed: int, extent: Extent) -> Generator[Any, None, None]:
    """Whole batches as the loader gives them, without looking ahead.

    Raises:
        UserCodeError: the loader raises.
        JobError: an epoch has no batch.
    """
    every = (batch for _, source in _epochs(batches, seed, extent) for batch in source)
    yield from itertools.islice(every, extent.batches)
