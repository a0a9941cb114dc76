"""Events of a training, and who observes them: files of the run folder, TensorBoard, the screen, the user's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roundelay.observe.action_trace import TraceHead


@dataclass(frozen=True, slots=True)
class Updated:
    """The last stage has finished a batch: its loss is known. Reported once per update, in order.

    Args:
        update: its number t, from 0; a run that continues from a checkpoint continues to count.
        epoch: its epoch, from 0.
        loss: its mean loss.
        rows: its samples.
        samples_per_second: over the last few seconds.
        busy: share of the time, 0 to 1, that each worker has computed so far.
        learning_rates: of this update, one per parameter group of the optimizer.
        seconds: since this run began.
        metrics: what the job's loss function returned in addition to the loss, averaged over the batch in the same way.
        loss_scale: of its last micro-batch; None where losses are not scaled.
    """

    update: int
    epoch: int
    loss: float
    rows: int
    samples_per_second: float
    busy: tuple[float, ...]
    learning_rates: tuple[float, ...]
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The job's ``evaluate`` has returned metrics of the weights after ``updates`` updates."""

    updates: int
    epoch: int
    metrics: dict[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of the weights after ``updates`` updates has been written.

    Args:
        path: its folder.
        updates: number of updates.
        left_out: how many were due meanwhile and were left out, as writing takes longer than the training between them.
    """

    path: str
    updates: int
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class NotSaved:
    """A checkpoint could not be written; the previous one is complete, and the training continues."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """A run that failed is restarted from its last checkpoint.

    Args:
        number: of the restart, from 1.
        updates: number of updates in the checkpoint; later ones are repeated.
        cause: why the run failed.
    """

    number: int
    updates: int
    cause: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A run that continues from a checkpoint in mid-flight starts with empty stages, so its results differ.

    Args:
        micro_batches: how many were in flight; they are forwarded again, with the checkpoint's weights. With 0 only
            older versions of weights are dropped: what would read these reads the checkpoint's.
        reason: what has changed.
    """

    micro_batches: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """``evaluate`` or ``on_update`` has stopped the training: the batch that is read next is the run's last."""

    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """The gradients of a batch are not finite, so the stages skip its update.

    Args:
        update: its number.
        in_a_row: length of the series of skipped updates that ends with this one.
        loss_scale: the largest of its micro-batches.
    """

    update: int
    in_a_row: int
    loss_scale: float


@dataclass(frozen=True, slots=True)
class Traced:
    """A stage whose order is free has written down what it did; for the run's folder, not for the user's functions.

    Args:
        head: of which stage and run.
        letters: of its further actions.
        digests: of its state, by the number of letters before, those of earlier events included.
        ended: whether these are the last.
    """

    head: TraceHead
    letters: str
    digests: dict[int, str] = field(hash=False)
    ended: bool


Event = Updated | Evaluated | Saved | NotSaved | Restarted | Drained | Stopping | Skipped | Traced


class Observer(Protocol):
    """Called with every event of a training, in order, in the thread that called for the training.

    An exception ends the training; :class:`roundelay.StopTraining` ends it in good order.
    """

    def __call__(self, event: Event, /) -> None:
        """Take one event."""


def ignore(event: Event) -> None:
    """An observer that does nothing."""


def broadcast(observers: Sequence[Observer]) -> Observer:
    """One observer that passes every event on to several, in order."""

    def observe(event: Event) -> None:
        for observer in observers:
            observer(event)

    return observe


def samples_per_second(updates: Sequence[Updated]) -> float:
    """Over all updates of a run but the first tenth, the warm-up."""
    skip = max(1, len(updates) // 10)
    if len(updates) <= skip:
        return 0.0
    seconds = updates[-1].seconds - updates[skip - 1].seconds
    return sum(update.rows for update in updates[skip:]) / seconds if seconds > 0 else 0.0
