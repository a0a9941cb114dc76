"""One epoch of the user's loader: opened once, peeked at by planning, and then consumed by the run.

The loader draws from random states of its own, seeded by (seed, epoch), so that its batches depend on nothing else that
happens in the process. Batches that planning peeks at are kept, and the run continues the same iterator: training on a
stream that can be read only once gets what plain PyTorch would get. Only a loader with worker processes is reopened,
since they belong to the process that started them.
"""

from __future__ import annotations

import os
import random
import threading
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, final

import numpy as np
import torch

from roundelay.errors import JobError, RoundelayError, UserCodeError
from roundelay.frontend.batch import copy_batch, leaves
from roundelay.frontend.stages.keyed_rng import DEFAULT_GENERATOR_LOCK
from roundelay.job import Batches, Peekable
from roundelay.runtime.loading.loader_generators import seed_own_generators, seed_reachable
from roundelay.runtime.loading.prefetch import note_request, set_held_up
from roundelay.runtime.processes.user_errors import loading_failed


class Generators:
    """The loader's own states of the random generators of torch, numpy and Python, swapped in while it runs."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any, Any] | None = None

    def seed(self, seed: int, epoch: int) -> None:
        """Seed the states for an epoch."""
        with self.active():
            seed_everything(seed * 1_000_003 + epoch)

    def follow(self, other: Generators) -> None:
        """Continue with the states of ``other``."""
        self._states = other._states

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the loader's states within the context; the process's own are restored afterwards."""
        set_held_up(True)
        with DEFAULT_GENERATOR_LOCK:
            set_held_up(False)
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


@final
class OpenEpoch:
    """One open epoch of a loader, with the batches that were peeked at and not consumed yet.

    Args:
        batches: the job's loader.
        seed: of the run.
        epoch: its number.
        generators: the loader's random states.

    Raises:
        UserCodeError: the loader raises.
        JobError: it can be read only once, and has been read.
    """

    def __init__(self, batches: Batches, seed: int, epoch: int, generators: Generators) -> None:
        self.batches, self.seed, self.epoch, self.generators = batches, seed, epoch, generators
        self._peeked: list[Any] = []
        #: seconds that the loader took for each batch peeked at
        self.seconds: list[float] = []
        self._error: UserCodeError | None = None
        self._number = 0
        self._ended = False
        self._opener = _process_and_thread()
        generators.seed(seed, epoch)
        with translate_loader_errors(f"batches({epoch})"), generators.active():
            seed_reachable(batches.batches if isinstance(batches, Peekable) else batches, seed * 1_000_003 + epoch)
            self.source = batches(epoch)
            if isinstance(batches, Peekable):
                batches.length = _length_of(self.source)
            _refuse_used(batches, self.source, epoch)
            _leave_to_parent(self.source)
            _start_processes(self.source, seed * 1_000_003 + epoch)
            seed_own_generators(self.source, seed * 1_000_003 + epoch)
            self._iterator = iter(self.source)

    @property
    def has_processes(self) -> bool:
        """Whether the loader has worker processes, which only the process that started them can use."""
        return bool(getattr(self._iterator, "_workers", ()))

    def peek(self, index: int) -> Any:
        """Return the batch of this number without consuming it; None if the epoch is shorter."""
        while len(self._peeked) <= index:
            began = perf_counter()
            batch = self._next_or_reopen(self._peeked)
            if batch is None:
                return None
            self._peeked.append(_copied_if_possible(batch))
            self.seconds.append(perf_counter() - began)
        if isinstance(self.batches, Peekable) and self.batches.first is None:
            self.batches.first = self.seed, self._peeked[0]
        return self._peeked[index]

    @property
    def peeked_bytes(self) -> int:
        """Bytes of the batches that were peeked at and not consumed yet."""
        return sum(leaf.numel() * leaf.element_size() for batch in self._peeked for leaf in leaves(batch).values())

    def rest(self) -> Iterator[Any]:
        """Consume the batches that are left, beginning with those that were peeked at.

        Raises:
            UserCodeError: the loader raises.
            JobError: it has no batch.
        """
        peeked = list(self._peeked)
        while self._peeked:
            yield self._peeked.pop(0)
        batch = self._next_or_reopen(peeked)
        while batch is not None:
            yield batch
            batch = self._next()

    def close(self) -> None:
        """End a DataLoader's processes now: a traceback may keep its iterator alive."""
        if hasattr(self._iterator, "_shutdown_workers") and not getattr(self.source, "persistent_workers", False):
            self._iterator._shutdown_workers()

    def _next_or_reopen(self, known: list[Any]) -> Any:
        """Return the next batch, reopening the loader if it only works in the thread or process that opened it.

        Args:
            known: the batches so far.
        """
        try:
            return self._next()
        except UserCodeError:
            if self._opener == _process_and_thread() or not self._reopen(known):
                raise
            return self._next()

    def _next(self) -> Any:
        """Return the loader's next batch; None at its end."""
        if self._ended:
            return None
        if self._error is not None:  # a generator that has raised would merely end here
            raise self._error
        what = f"batch {self._number} of batches({self.epoch})"
        try:
            with translate_loader_errors(what, self._iterator), self.generators.active():
                batch = next(self._iterator, self._iterator)
        except UserCodeError as error:
            self._error = error
            raise
        if batch is not self._iterator:
            self._number += 1
            return batch
        self._ended = True
        if self._number:
            return None
        raise JobError(
            f"batches({self.epoch})",
            got="no batch",
            expected="at least one batch in every epoch",
            remedy="Check the data set's size, and drop_last of the loader.",
        )

    def _reopen(self, known: list[Any]) -> bool:
        """Reopen the loader in this thread; False if it then does not begin with the same batches."""
        try:
            fresh = OpenEpoch(self.batches, self.seed, self.epoch, self.generators)
            if not all(same_batch(fresh._next(), batch) for batch in known):
                return False
        except RoundelayError:
            return False
        self.source, self._iterator = fresh.source, fresh._iterator
        self._opener, self._error = _process_and_thread(), None
        return True


def open_first_epoch(batches: Batches, seed: int) -> OpenEpoch:
    """Open the first epoch to peek at it; it stays open for the run if the loader allows."""
    if not isinstance(batches, Peekable):
        return OpenEpoch(batches, seed, 0, Generators())
    if batches.opened is None or batches.opened.seed != seed:
        batches.opened = OpenEpoch(batches, seed, 0, Generators())
    opened: OpenEpoch = batches.opened
    return opened


def finish_peeking(opened: OpenEpoch) -> None:
    """End peeking: close an epoch whose loader has processes."""
    if opened.has_processes:
        opened.close()
        if isinstance(opened.batches, Peekable):
            opened.batches.opened = None


def take_first_epoch(batches: Batches, seed: int) -> OpenEpoch | None:
    """Hand the first epoch, if it was opened with this seed, over to the run that continues it."""
    if not isinstance(batches, Peekable) or batches.opened is None or batches.opened.seed != seed:
        return None
    opened: OpenEpoch = batches.opened
    batches.opened = None
    return opened


def forget(batches: Batches) -> None:
    """Close the epoch that was peeked at, so that the next reader reopens the loader."""
    if isinstance(batches, Peekable) and batches.opened is not None:
        batches.opened.close()
        batches.opened = None


def _length_of(source: Any) -> int | None:
    try:
        return len(source)
    except Exception:  # a generator, or a loader that does not know
        return None


def _process_and_thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def same_batch(one: Any, other: Any) -> bool:
    """Whether two batches hold equal tensors."""
    if one is None or other is None:
        return one is other
    first, second = leaves(one), leaves(other)
    return first.keys() == second.keys() and all(torch.equal(first[path], second[path]) for path in first)


def _copied_if_possible(batch: Any) -> Any:
    """Copy a batch if it is of a supported type."""
    try:
        return copy_batch(batch)
    except Exception:  # an unsupported type of batch, which is reported where it is used
        return batch


def _refuse_used(batches: Batches, source: Any, epoch: int) -> None:
    """Reject an iterator that was read before.

    Raises:
        JobError: ``batches`` returned the same iterator for an earlier epoch or run.
    """
    if not hasattr(source, "__next__") or not isinstance(batches, Peekable):
        return
    if source is batches.once:
        raise JobError(
            f"batches({epoch})",
            got=f"the same {type(source).__name__} as before, which can be read only once",
            expected="new data for every epoch, and for every further reading: a second run, a restart, `verify`",
            remedy="Create the generator inside batches, or return a list or a DataLoader; for one pass over a stream "
            "use `--epochs 1` or --steps.",
        )
    batches.once = source


def _leave_to_parent(source: Any) -> None:
    """Detach a DataLoader from persistent processes of the parent process, so that it starts its own.

    The parent may continue to use its processes, so they are neither used nor ended here.
    """
    iterator = getattr(source, "_iterator", None)
    started = {getattr(process, "_parent_pid", os.getpid()) for process in getattr(iterator, "_workers", ())}
    if started - {os.getpid()}:
        _INHERITED.append(iterator)
        source._iterator = None


def _start_processes(source: Any, seed: int) -> None:
    """Start a DataLoader's persistent processes before its first epoch, whose order starting them would change.

    Starting them draws a random number, and a loader that has them does not draw it again.
    """
    if getattr(source, "persistent_workers", False):
        if getattr(source, "_iterator", None) is None:
            iter(source)
        seed_everything(seed)


_INHERITED: list[Any] = []
"""Iterators of a parent process; destroying them would end its loader processes."""


@contextmanager
def translate_loader_errors(what: str, iterator: Any = None) -> Iterator[None]:
    """Run code of the user's loader and convert its exceptions.

    Args:
        what: what is requested of it, for messages.
        iterator: the loader's iterator; a DataLoader's may have processes.

    Raises:
        UserCodeError: the loader raised.
    """
    processes = getattr(iterator, "_workers", ())
    note_request(what, processes)
    try:
        yield
    except RoundelayError:
        raise
    except (Exception, SystemExit, CancelledError) as error:  # of the user's loader; not Ctrl-C
        raise loading_failed(what, error, processes) from error
