"""What a person brings: a model, a loss, data and an optimizer, in one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundelay import fork_safety  # noqa: F401  a job exists only where autograd was started safely

Named = list[tuple[str, torch.nn.Parameter]]
Batches = Callable[[int], Iterable[Any]]
OptimizerFactory = Callable[[Named], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Evaluate = Callable[[torch.nn.Module], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job.

    Args:
        model: any module that ``torch.export`` can follow; used unmodified. It trains in training mode; if it is in
            that mode already, parts of it that are in eval mode (a BatchNorm whose statistics stay) are left in it.
        loss: (outputs, batch) -> the mean over the micro-batch's rows, or (sum, count) when it averages over
            something else than rows; or a dict of such a ``loss`` and metrics beside it, in either form.
        batches: epoch number -> iterable of dicts or tuples of tensors, batch dimension first. Lists and arrays beside
            them that are as long as the batch (its texts) are cut with it, for ``inputs``; the loss reads tensors only.
        optimizer: list of (name, parameter) -> torch optimizer; names make parameter groups possible.
        inputs: batch -> (args, kwargs) of the model's call; by default all of a tuple but its last, or all of a dict.
        scheduler: optimizer -> torch learning-rate scheduler, stepped after every update.
        evaluate: model -> metrics; gets the original module in eval mode with the freshest weights.
        showcase: model -> text to show after training, for example a few lines that a language model writes.
        weights: safetensors file, or folder of such, that the model's weights are in; the model may then be built with
            :func:`roundelay.empty_weights`, and no worker holds more than its stage.
        steps: updates to make when neither ``--steps`` nor ``--epochs`` is given; else one epoch.

    What is called in a run is called on workers. Over ``memory`` these share threads, so a worker's next call may come
    in another one: code that is bound to its thread (an open sqlite3 connection) asks for ``transport="shm"``.
    """

    model: torch.nn.Module
    loss: Callable[[Any, Any], Any]
    batches: Batches
    optimizer: OptimizerFactory
    inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    scheduler: SchedulerFactory | None = None
    evaluate: Evaluate | None = None
    showcase: Callable[[torch.nn.Module], str] | None = None
    weights: str | Path | None = None
    steps: int | None = None
