"""One epoch of the person's loader: opened once, looked at ahead of a run, and read on from there by the run.

The loader draws from random states of its own, seeded by (seed, epoch): what it yields depends on nothing else that
happens in the process. What planning looks at is kept, and the run goes on with the same iterator, so that a stream
that can be read only once, or that goes on where it was left, gives training what plain PyTorch would get. Only a
loader with processes of its own is opened anew: these belong to the process that started them.
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
from roundelay.frontend.batch import copied, leaves
from roundelay.frontend.keyed_rng import DEFAULT_GENERATOR_LOCK
from roundelay.job import Batches, Peekable
from roundelay.runtime.prefetch import hold_up, note
from roundelay.runtime.user_errors import loading_failed


class Generators:
    """The loader's own states of torch's, numpy's and Python's generators, swapped in while it runs."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any, Any] | None = None

    def seed(self, seed: int, epoch: int) -> None:
        """Start an epoch."""
        with self.active():
            seed_everything(seed * 1_000_003 + epoch)

    def follow(self, other: Generators) -> None:
        """Go on with the states of another's loader."""
        self._states = other._states

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


@final
class OpenEpoch:
    """One epoch of a loader, and what has been read of it and not been given out yet.

    Args:
        batches: the job's loader.
        seed: of the run.
        epoch: its number.
        generators: the loader's random states.

    Raises:
        UserCodeError: the loader raises.
        JobError: it is one that can be read only once, and has been read.
    """

    def __init__(self, batches: Batches, seed: int, epoch: int, generators: Generators) -> None:
        self.batches, self.seed, self.epoch, self.generators = batches, seed, epoch, generators
        self._looked: list[Any] = []
        #: seconds that the loader took for each batch that was looked at
        self.seconds: list[float] = []
        self._fault: UserCodeError | None = None
        self._number = 0
        self._ended = False
        self._opener = _who()
        generators.seed(seed, epoch)
        with user_code(f"batches({epoch})"), generators.active():
            self.source = batches(epoch)
            _refuse_used(batches, self.source, epoch)
            _leave_to_parent(self.source)
            _start_processes(self.source, seed * 1_000_003 + epoch)
            _seed_own_generators(self.source, seed * 1_000_003 + epoch)
            self._iterator = iter(self.source)

    @property
    def has_processes(self) -> bool:
        """Whether a loader's processes work at it, which only the process that started them can ask."""
        return bool(getattr(self._iterator, "_workers", ()))

    def look(self, index: int) -> Any:
        """The batch of this number, without using it up; None if there are not so many."""
        while len(self._looked) <= index:
            began = perf_counter()
            batch = self._next_or_again(self._looked)
            if batch is None:
                return None
            self._looked.append(_kept(batch))
            self.seconds.append(perf_counter() - began)
        if isinstance(self.batches, Peekable) and self.batches.first is None:
            self.batches.first = self.seed, self._looked[0]
        return self._looked[index]

    @property
    def held_bytes(self) -> int:
        """Bytes of the batches that were looked at and wait for the run."""
        return sum(leaf.numel() * leaf.element_size() for batch in self._looked for leaf in leaves(batch).values())

    def rest(self) -> Iterator[Any]:
        """All batches that have not been given out, those first that were looked at.

        Raises:
            UserCodeError: the loader raises.
            JobError: it has no batch.
        """
        looked = list(self._looked)
        while self._looked:
            yield self._looked.pop(0)
        batch = self._next_or_again(looked)
        while batch is not None:
            yield batch
            batch = self._next()

    def close(self) -> None:
        """End a DataLoader's processes with its iterator, which an error may keep as long as somebody looks at it."""
        if hasattr(self._iterator, "_shutdown_workers") and not getattr(self.source, "persistent_workers", False):
            self._iterator._shutdown_workers()

    def _next_or_again(self, known: list[Any]) -> Any:
        """The next batch, of a loader opened anew if it is bound to the thread or process that has opened it.

        Args:
            known: the batches so far.
        """
        try:
            return self._next()
        except UserCodeError:
            if self._opener == _who() or not self._opens_again(known):
                raise
            return self._next()

    def _next(self) -> Any:
        """The next batch of the loader; None at its end."""
        if self._ended:
            return None
        if self._fault is not None:  # a generator that has raised would end here without a word
            raise self._fault
        what = f"batch {self._number} of batches({self.epoch})"
        try:
            with user_code(what, self._iterator), self.generators.active():
                batch = next(self._iterator, self._iterator)
        except UserCodeError as error:
            self._fault = error
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

    def _opens_again(self, known: list[Any]) -> bool:
        """Open the loader anew here, if it then begins with the same batches."""
        try:
            again = OpenEpoch(self.batches, self.seed, self.epoch, self.generators)
            if not all(alike(again._next(), batch) for batch in known):
                return False
        except RoundelayError:
            return False
        self.source, self._iterator, self._opener, self._fault = again.source, again._iterator, _who(), None
        return True


def peeked(batches: Batches, seed: int) -> OpenEpoch:
    """The first epoch, opened to be looked at; it stays open for the run, if it can."""
    if not isinstance(batches, Peekable):
        return OpenEpoch(batches, seed, 0, Generators())
    if batches.opened is None or batches.opened.seed != seed:
        batches.opened = OpenEpoch(batches, seed, 0, Generators())
    opened: OpenEpoch = batches.opened
    return opened


def looked_at(opened: OpenEpoch) -> None:
    """Whoever has looked does so no more."""
    if opened.has_processes:
        opened.close()
        if isinstance(opened.batches, Peekable):
            opened.batches.opened = None


def taken(batches: Batches, seed: int) -> OpenEpoch | None:
    """The first epoch, if it was looked at with this seed: for the run that reads on, and for no other."""
    if not isinstance(batches, Peekable) or batches.opened is None or batches.opened.seed != seed:
        return None
    opened: OpenEpoch = batches.opened
    batches.opened = None
    return opened


def forget(batches: Batches) -> None:
    """What was looked at is not for the run: whoever reads next opens the loader anew."""
    if isinstance(batches, Peekable) and batches.opened is not None:
        batches.opened.close()
        batches.opened = None


def _who() -> tuple[int, int]:
    """This process and thread."""
    return os.getpid(), threading.get_ident()


def alike(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors."""
    if one is None or other is None:
        return one is other
    first, second = leaves(one), leaves(other)
    return first.keys() == second.keys() and all(torch.equal(first[path], second[path]) for path in first)


def _kept(batch: Any) -> Any:
    """A copy, if the batch is of a kind that can be copied: a loader may fill its own tensors again."""
    try:
        return copied(batch)
    except Exception:  # the person's own kind of batch: told where it is used
        return batch


def _refuse_used(batches: Batches, source: Any, epoch: int) -> None:
    """Refuse what can be read only once and has been.

    Raises:
        JobError: it is such.
    """
    if not hasattr(source, "__next__") or not isinstance(batches, Peekable):
        return
    if source is batches.once:
        raise JobError(
            f"batches({epoch})",
            got=f"the same {type(source).__name__} as before, which can be read only once",
            expected="data for every epoch, and for whatever reads them again: a second run, a restart, `verify`",
            remedy="Make the generator inside of batches, or return a list or a DataLoader; one pass over a stream is "
            "`--epochs 1`, or --steps.",
        )
    batches.once = source


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
