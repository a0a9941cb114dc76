"""What a person brings: a model, a loss, data and an optimizer, in one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch

from roundelay import fork_safety  # noqa: F401  a job exists only where autograd was started safely

Named = list[tuple[str, torch.nn.Parameter]]
Batches = Callable[[int], Iterable[Any]]
OptimizerFactory = Callable[[Named], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Evaluate = Callable[[torch.nn.Module], dict[str, float]]


@final
class Peekable:
    """The job's loader, and what was opened of its first epoch to be looked at ahead of a run.

    Args:
        batches: epoch number -> iterable of batches, as the person gave it.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        #: of the first epoch, what has been opened and not been read on by a run
        #: (:mod:`roundelay.runtime.loading.loader_epoch`)
        self.opened: Any = None
        #: the last iterator that was given: the same one again has been read
        self.once: Any = None
        #: the first batch that was ever looked at, with its seed
        self.first: tuple[int, Any] | None = None
        #: batches of the epoch opened last, if what was opened says so
        self.length: int | None = None

    def __call__(self, epoch: int) -> Iterable[Any]:
        """The batches of an epoch."""
        return self.batches(epoch)


@final
class EveryEpoch:
    """A loader, or what else can be iterated again, whose batches are those of every epoch.

    Args:
        source: it; ``set_epoch`` of it, its samplers and its data set is called with each epoch's number.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __call__(self, epoch: int) -> Iterable[Any]:
        """The batches of an epoch."""
        sampled = getattr(self.source, "batch_sampler", None)
        parts = (self.source, getattr(self.source, "sampler", None), sampled, getattr(sampled, "sampler", None))
        known = {id(part): part for part in (*parts, getattr(self.source, "dataset", None))}
        for part in known.values():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        return self.source


class StopTraining(Exception):
    """Raised by ``evaluate``, or by ``on_update``, to have the training end early and in good order.

    The batch that is read next is the last one, for all stages. The summary says why the training has ended.

    Args:
        reason: why, for people.
        metrics: what ``evaluate`` would have returned.
    """

    def __init__(self, reason: str = "", metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason or "StopTraining was raised"
        self.metrics = dict(metrics or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job.

    Args:
        model: any module that ``torch.export`` can follow; used unmodified. It trains in training mode; if it is in
            that mode already, parts of it that are in eval mode (a BatchNorm whose statistics stay) are left in it.
        loss: (outputs, batch) -> the mean over the micro-batch's rows, or (sum, count) when it averages over
            something else than rows; or a dict of such a ``loss`` and metrics beside it, in either form.
        batches: a DataLoader, or what else can be iterated again; or a function, epoch number -> iterable. Batches are
            dicts, tuples or objects of tensors, batch dimension first. Lists and arrays beside them that are as long as
            the batch (its texts) are cut with it, for ``inputs``; the loss reads tensors and numbers only.
        optimizer: list of (name, parameter) -> torch optimizer; names make parameter groups possible.
        inputs: batch -> (args, kwargs) of the model's call; by default all of a tuple but its last, or all of a dict.
        scheduler: optimizer -> torch learning-rate scheduler, stepped after every update; a ``ReduceLROnPlateau`` after
            every epoch, with what ``evaluate`` says: the next epoch waits for it.
        evaluate: model -> metrics; gets the original module in eval mode with the freshest weights. May raise
            :class:`StopTraining`.
        monitor: name of the number of ``evaluate`` that a ``ReduceLROnPlateau`` scheduler is stepped with; by default
            the only one, or ``loss``.
        showcase: model -> text to show after training, for example a few lines that a language model writes.
        weights: safetensors file, or folder of such, that the model's weights are in; the model may then be built with
            :func:`roundelay.empty_weights`, and no worker holds more than its stage.
        ema: decay of an exponential moving average of the weights, such as 0.999; ``evaluate`` and ``showcase`` get the
            averages, with the newest buffers. None: no average, unless ``--ema`` asks for one.
        steps: updates to make when neither ``--steps`` nor ``--epochs`` is given; else one epoch.

    What is called in a run is called on workers. Over ``memory`` these share threads, so a worker's next call may come
    in another one: code that is bound to its thread (an open sqlite3 connection) asks for ``transport="shm"``.
    """

    model: torch.nn.Module
    loss: Callable[[Any, Any], Any]
    batches: Batches | Iterable[Any]
    optimizer: OptimizerFactory
    inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    scheduler: SchedulerFactory | None = None
    evaluate: Evaluate | None = None
    monitor: str | None = None
    showcase: Callable[[torch.nn.Module], str] | None = None
    weights: str | Path | None = None
    ema: float | None = None
    steps: int | None = None

    @property
    def loader(self) -> Batches:
        """``batches`` as a function of the epoch."""
        return cast("Batches", self.batches)

    def __post_init__(self) -> None:
        given: Any = self.batches
        if not callable(given) and isinstance(given, Iterable) and not isinstance(given, Iterator):
            given = EveryEpoch(given)
        if callable(given) and not isinstance(given, Peekable):  # else it is refused by its name, later
            object.__setattr__(self, "batches", Peekable(given))
