"""Runs that keep every checkpoint they make, and runs that go on from each of them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.checkpoint import Checkpoint, Manifest
from roundelay.checkpoint.stored_files import MANIFEST
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.runtime.loading.checkpoint_schedule import RunControl
from roundelay.session.events import Event
from roundelay.session.training import Length, Saving, Session, Trained

Change = Callable[[Checkpoint], Checkpoint]


@contextmanager
def every_checkpoint(monkeypatch: Any, folder: Path) -> Iterator[None]:
    """Copy each checkpoint into a folder of its own below ``folder``, named by its updates; none is left out."""

    def commit(path: Path, manifest: Manifest) -> None:
        committing(path, manifest)
        copy = folder / str(manifest.facts.position.updates)
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        for name in (MANIFEST, *(holder.file for holder in manifest.holders)):
            shutil.copy(path / name, copy / name)

    committing = store.commit
    with monkeypatch.context() as patched:
        patched.setattr(store, "commit", commit)
        patched.setattr(RunControl, "saving", property(lambda control: False))
        yield


@dataclasses.dataclass(frozen=True)
class Trip:
    """One plan of a job: run it whole, or go on from a checkpoint.

    Args:
        job: makes the job; called for every run, so that nothing is carried over.
        captured: its model.
        plan: the plan.
        length: of the whole run.
        restore: puts the model's first weights back.
    """

    job: Callable[[], Job]
    captured: Captured
    plan: Plan
    length: Length
    restore: Callable[[], None]
    seed: int = 0

    def whole(self, saving: Saving | None = None) -> Trained:
        """The run that nothing interrupts."""
        self.restore()
        session = Session(self.job(), self.captured, self.plan, self.seed, self.length)
        return session.run(notify=lambda event: None, saving=saving)

    def rest(self, start: Checkpoint, told: list[Event] | None = None, saving: Saving | None = None) -> Trained:
        """What follows a checkpoint, to the same end."""
        self.restore()
        steps = None if self.length.steps is None else self.length.steps - start.position.updates
        length = Length(steps=steps, epochs=self.length.epochs)
        session = Session(self.job(), self.captured, self.plan, self.seed, length, start)
        return session.run(notify=(lambda event: None) if told is None else told.append, saving=saving)


def differences(whole: Trained, rest: Trained, start: Checkpoint) -> list[str]:
    """What a continued run has done otherwise than the whole one."""
    ours, theirs = _left_by(rest), _left_by(whole)
    odd = [name for name in {**ours, **theirs} if not _same(ours.get(name), theirs.get(name))]
    after = {g: loss for g, loss in whole.micro_losses.items() if g >= start.position.micro_batches}
    odd += ["losses"] * (rest.micro_losses != after)
    told = [(u.update, u.epoch, u.loss) for u in whole.updates if u.update >= start.position.updates]
    return odd + ["updates told"] * ([(u.update, u.epoch, u.loss) for u in rest.updates] != told)


def _left_by(trained: Trained) -> dict[str, Any]:
    snapshot = trained.snapshot
    left: dict[str, Any] = {f"parameter {n}": t for n, t in snapshot.parameters.items()}
    left |= {f"buffer {n}": t for n, t in snapshot.buffers.items()}
    for name, state in snapshot.optimizer.items():
        left |= {f"state {key} of {name}": value for key, value in state.items()}
    return left


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
