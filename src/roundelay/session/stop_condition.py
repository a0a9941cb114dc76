"""When a training stops: the number of updates or epochs, and the range of the data that it reads."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.checkpoint.checkpoint import Checkpoint, Position
from roundelay.errors import UsageError
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.lower.reading import read
from roundelay.planner.check_given import check_length
from roundelay.runtime.loading.checkpoint_schedule import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """When to stop: after a number of updates, or at the end of an epoch.

    By default: where the interrupted run would have stopped that a checkpoint was saved by; else after the job's own
    ``steps``, or after one epoch.
    """

    steps: int | None = None
    epochs: int | None = None


def extent(job: Job, length: Length, start: Checkpoint | None, plan: Plan | None = None) -> Extent:
    """The range of the data that a training reads by a plan, or by one with a replica.

    Raises:
        UsageError: the length is not positive, or the checkpoint has already reached it.
    """
    check_length(length.steps, length.epochs)
    position = Position(0, 0, 0, 0) if start is None else start.position
    if length == Length() and start is not None and start.until.is_after(position):  # an interrupted run
        until = start.until
        length = Length(steps=None if until.updates is None else until.updates - position.updates, epochs=until.epochs)
    steps = length.steps if length.epochs is not None or length.steps is not None else job.steps
    epochs = length.epochs if length.epochs is not None else (position.epoch + 1 if steps is None else None)
    if epochs is not None and position.epoch >= epochs:
        raise UsageError(
            "--epochs",
            got=f"{epochs}, but the checkpoint has already finished {position.epoch}",
            expected="more epochs than the checkpoint has",
            remedy=f"Give --epochs {position.epoch + 1} or more, or --steps.",
        )
    g = -(-position.micro_batches // (1 if plan is None else plan.replicas))  # no number is given twice
    if plan is not None and read(plan).schedule.window == "slots":
        g += -g % plan.micro_batches  # batches begin at multiples of their size
    return Extent(g, position.updates, position.epoch, position.batches_into_epoch, steps, epochs)
