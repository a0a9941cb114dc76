"""Refuse jobs whose code keeps state between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from roundelay.errors import JobError, RoundelayError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, copy_batch, in_step, num_rows, replace, rows_between, split
from roundelay.frontend.export.export_adapter import default_inputs
from roundelay.frontend.loss_metrics import split as split_metrics
from roundelay.frontend.side_effects import SideEffects
from roundelay.guards.optimizer_trial import try_in_child
from roundelay.guards.python_state import refuse_state, state_of
from roundelay.job import Job, Peekable
from roundelay.reach.reachable_state import Change, ReachableState

FEW = 32
"""Rows that are enough to see what a call leaves for the next, counters of rare events included."""

LIMIT_S = 120.0
"""Seconds that all calls together may take."""


def check_stateless(job: Job, captured: Captured, sample: Batch) -> str:
    """Refuse a model or a loss in which one call reads what an earlier one has left.

    They are called only if a slot changed during capture, and then in a child process.

    Returns:
        The slot that the loss sets and one of its metrics reads in the next call, in words; empty if there is none.

    Raises:
        CaptureError: the forward is such code.
        JobError: the loss is, or the data depend on either.
    """
    effects, of_metric = captured.effects, ""
    if effects.changes and not any(parameter.is_meta for parameter in job.model.parameters()):
        calls = partial(_check_calls, job, sample, effects, metrics=bool(captured.graph.metrics))
        what = "looking for what the model keeps from call to call"
        of_metric = try_in_child(calls, what, LIMIT_S, lambda why: "")
    _refuse_dependent_data(job, effects.changes)
    return of_metric


def check_reused(job: Job, captured: Captured, *, batches: int | None, epochs: int | None) -> None:
    """Refuse writes into tensors of a list that ``batches`` returns again, modified, in the next epoch.

    Args:
        job: the job.
        captured: its model.
        batches: number of batches of the run; None if it is given by epochs.
        epochs: number of epochs; None if it is given by batches.

    Raises:
        JobError: there are such writes, and the run has a second epoch.
    """
    opened = job.loader.opened if isinstance(job.loader, Peekable) else None
    source = getattr(opened, "source", None)
    if not captured.effects.written or not isinstance(source, (list, tuple)):
        return
    again = (batches is not None and batches > len(source)) or (batches is None and (epochs or 1) > 1)
    if again and job.loader.batches(0) is source:  # type: ignore[attr-defined]
        who = "Job(inputs=...)" if captured.effects.written_by_inputs else "the model's forward"
        raise JobError(
            f"batch field {captured.effects.written[0]!r}, which {who} writes into",
            got="a tensor of a list that is reused in the next epoch, in which plain PyTorch would use the new values",
            expected="data that are the same in every epoch",
            remedy="Write into a copy, x = x.clone(), or compute a new tensor: x / 255 in the place of x.div_(255).",
        )


def _refuse_dependent_data(job: Job, changes: Sequence[Change]) -> None:
    """Refuse a data loader that reads what the forward or the loss sets: these run later, in other processes."""
    if not changes:
        return
    batches = job.loader.batches if isinstance(job.loader, Peekable) else job.loader
    change = ReachableState([("batches", batches)]).first_read(changes)
    if change is not None:
        raise JobError(
            f"{change.slot.path}, which the model or the loss sets and batches(epoch) can read",
            got="data that depend on the training",
            expected="the same data whatever was trained before: batches are prefetched",
            remedy="To watch the training, return what a meter would keep as a metric, {'loss': loss, 'accuracy': a}, "
            "or give train(on_update=...). Compute what varies with the training in the loss or in forward.",
        )


def _check_calls(job: Job, sample: Batch, effects: SideEffects, *, metrics: bool) -> str:
    """On the first rows of the sample; on all of it if the model or the loss fails on these."""
    if in_step(sample) and num_rows(sample) > FEW:
        try:
            return _check_calls_on(job, rows_between(sample, 0, FEW), effects, metrics=metrics)
        except RoundelayError:
            raise
        except Exception:  # a size that the model does not take, for example
            pass
    return _check_calls_on(job, sample, effects, metrics=metrics)


def _check_calls_on(job: Job, sample: Batch, effects: SideEffects, *, metrics: bool) -> str:
    def both(rows: Batch) -> tuple[Any, dict[str, Any]]:
        batch = copy_batch(rows)
        args, kwargs = (job.inputs or default_inputs)(batch)
        return split_metrics(job.loss(job.model(*args, **kwargs), batch))

    def call(rows: Batch) -> Any:
        return both(rows)[0]  # metrics may depend on earlier calls

    with torch.random.fork_rng(devices=[]):

        def other() -> Any:
            try:
                return _call_with_other_weights(job.model, call, _other_batch(sample))
            except Exception:  # state with as many rows as the batch, for example
                return _call_with_other_weights(job.model, call, _reversed(sample))

        of_loss = {change.slot.id for change in effects.of_loss}
        of_loss -= {change.slot.id for change in effects.of_forward}
        roots = [("model", job.model), ("loss", job.loss)]
        refuse_state(job.model, lambda: call(sample), other, roots, of_loss)
        return state_of(job.model, lambda: both(sample)[1], other, roots) if of_loss and metrics else ""


def check_metrics(captured: Captured, callers: int) -> None:
    """Refuse a metric that depends on earlier calls of the loss, if several workers call it, each for its own rows.

    Args:
        captured: the model.
        callers: workers that call the loss.

    Raises:
        JobError: naming what the metric reads.
    """
    if captured.effects.read_by_metric and callers > 1:
        raise JobError(
            f"{captured.effects.read_by_metric} and a metric reads",
            got=f"{callers} workers that call the loss, each for rows of its own",
            expected="metrics that depend on the micro-batch at hand alone",
            remedy='Return a pair, which is added up over all rows: {"loss": loss, "accuracy": (right, rows)}; or '
            "have the last stage on one worker.",
        )


def _call_with_other_weights(model: torch.nn.Module, call: Callable[[Batch], Any], sample: Batch) -> Any:
    """A call on another batch with other weights, without which an average of weights would not change."""
    weights = [(weight, weight.detach().clone()) for weight in model.parameters()]
    try:
        for weight, _ in weights:
            if weight.is_floating_point():
                weight.data.mul_(1.125)
        return call(sample)
    finally:
        for weight, value in weights:
            weight.data.copy_(value)


def _other_batch(sample: Batch) -> Batch:
    """A batch unlike the sample: half of its rows, or with less than four rows :func:`_reversed`."""
    if in_step(sample) and num_rows(first := split(sample, 2)[0]) > 1:
        return first
    return _reversed(sample)


def _reversed(sample: Batch) -> Batch:
    """A batch unlike the sample, of the same sizes: rows in reverse order, floating-point numbers scaled."""

    def other(_: str, leaf: torch.Tensor) -> torch.Tensor:
        reversed_rows = leaf.flip(0) if leaf.ndim else leaf
        return reversed_rows * 1.25 if leaf.is_floating_point() else reversed_rows

    return replace(sample, other)
