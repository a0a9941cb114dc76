"""How long to train, and so from where to where the data are read."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.checkpoint.checkpoint import Checkpoint, Position
from roundelay.errors import UsageError
from roundelay.job import Job
from roundelay.runtime.batch_reader import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long to train: a number of updates, or up to an epoch.

    If neither is given: to the end of the interrupted run that a checkpoint is of; else the job's own ``steps``, or one
    epoch.
    """

    steps: int | None = None
    epochs: int | None = None


def extent(job: Job, length: Length, start: Checkpoint | None) -> Extent:
    """From where to where to read the data.

    Raises:
        UsageError: the length is not positive, or the checkpoint is already there.
    """
    for name, value in (("steps", length.steps), ("epochs", length.epochs)):
        if value is not None and value < 1:
            raise UsageError(f"--{name}", got=str(value), expected="at least 1", remedy=f"Give a positive --{name}.")
    at = Position(0, 0, 0, 0) if start is None else start.position
    if length == Length() and start is not None and start.until.is_after(at):  # it was interrupted
        until = start.until
        length = Length(steps=None if until.updates is None else until.updates - at.updates, epochs=until.epochs)
    steps = length.steps if length.epochs is not None or length.steps is not None else job.steps
    epochs = length.epochs if length.epochs is not None else (at.epoch + 1 if steps is None else None)
    if epochs is not None and at.epoch >= epochs:
        raise UsageError(
            "--epochs",
            got=f"{epochs}, but the checkpoint has {at.epoch} behind it",
            expected="more epochs than the checkpoint has",
            remedy=f"Give --epochs {at.epoch + 1} or more, or --steps.",
        )
    return Extent(at.micro_batches, at.updates, at.epoch, at.batches_into_epoch, steps, epochs)
