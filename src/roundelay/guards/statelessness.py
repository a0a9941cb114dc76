"""Refuse jobs whose code keeps state between calls, and guard capture's own calls of user code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from roundelay.errors import JobError, RoundelayError, RunError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, copy_batch, in_step, num_rows, replace, rows_between, split
from roundelay.frontend.export.export_adapter import default_inputs
from roundelay.frontend.export.gradient_hooks import hooks_of
from roundelay.frontend.loss_metrics import split as split_metrics
from roundelay.guards.python_state import refuse_state, state_of
from roundelay.job import Job, Peekable
from roundelay.launching.forked_call import isolated
from roundelay.reach.reachable_state import DEFAULT_GENERATORS, Change, ReachableState
from roundelay.reach.source_lines import users_line
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, without_gradients
from roundelay.runtime.processes.discarded_writes import discarding_writes

Changes = tuple[tuple[Change, ...], tuple[Change, ...]]
"""Slots that the forward changes, and those that the loss does."""

FEW = 32
"""Rows that are enough to see what a call leaves for the next, counters of rare events included."""

LIMIT_S = 120.0
"""Seconds that all calls together may take."""


def reachable_state_of(job: Job) -> ReachableState:
    """The state that the user's model and functions can reach, and the default random number generators.

    Data loaders are not included: they are read once.
    """
    functions = (("loss", job.loss), ("inputs", job.inputs), ("optimizer", job.optimizer), ("scheduler", job.scheduler))
    hooks = [("hook", hook) for of_parameter in hooks_of(job.model).values() for hook in of_parameter]
    roots = [("model", job.model), *hooks, *((name, call) for name, call in functions if call is not None)]
    return ReachableState([*roots, *DEFAULT_GENERATORS], job.model)


@contextmanager
def preserving_state(job: Job) -> Iterator[None]:
    """Restore the user's objects after the block, except for buffers that a first forward has created.

    Calls by capture and profiling leave no trace: not in the model's attributes, in counters of the loss, in tensors
    and lists that functions fill, nor in random number generators, nor in open files. The block must not read a batch.
    """
    state = reachable_state_of(job)
    try:
        with discarding_writes(state.files()):
            yield
    finally:
        state.restore(except_kinds=("buffer", "parameter"))


@contextmanager
def refusing_calls(model: torch.nn.Module) -> Iterator[None]:
    """Refuse a data loader that calls the trained model, in any thread: it would get weights of another version.

    Raises:
        JobError: the model is called within the block.
    """
    own = set(model.modules())

    def refuse(module: torch.nn.Module, _: Any) -> None:
        if module in own:
            raise JobError(
                f"batches(epoch), which calls the model{users_line()}",
                got="data that depend on the weights",
                expected="the same data whatever the weights are: batches are prefetched while stages train",
                remedy="Weight or mask rows in the loss, where outputs are those of the newest weights; or choose rows "
                "between runs: train an epoch, and continue with --from RUN.",
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def check_stateless(job: Job, captured: Captured, sample: Batch) -> str:
    """Refuse a model or a loss in which one call reads what an earlier one has left.

    They are called only if a slot changed during capture, and then in a child process.

    Returns:
        The slot that the loss sets and one of its metrics reads in the next call, in words; empty if there is none.

    Raises:
        CaptureError: the forward is such code.
        JobError: the loss is, or the data depend on either.
    """
    changed, of_metrics = captured.changed, ""
    if any(changed) and not any(parameter.is_meta for parameter in job.model.parameters()):
        of_metrics = _check_in_child(job, sample, changed, metrics=bool(captured.graph.metrics))
    _refuse_dependent_data(job, (*changed[0], *changed[1]))
    return of_metrics


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
    if not any(captured.writes) or not isinstance(source, (list, tuple)):
        return
    again = (batches is not None and batches > len(source)) or (batches is None and (epochs or 1) > 1)
    if again and job.loader.batches(0) is source:  # type: ignore[attr-defined]
        who = "Job(inputs=...)" if captured.writes[0] else "the model's forward"
        raise JobError(
            f"batch field {[*captured.writes[0], *captured.writes[1]][0]!r}, which {who} writes into",
            got="a tensor of a list that is reused in the next epoch, in which plain PyTorch would use the new values",
            expected="data that are the same in every epoch",
            remedy="Write into a copy, x = x.clone(), or compute a new tensor: x / 255 in the place of x.div_(255).",
        )


def _check_in_child(job: Job, sample: Batch, changed: Changes, *, metrics: bool) -> str:
    if not hasattr(os, "fork"):
        return _check_calls(job, sample, changed, metrics=metrics)
    what = "looking for what the model keeps from call to call"
    try:
        found = isolated(lambda: _check_calls(job, sample, changed, metrics=metrics), what, limit_s=LIMIT_S, quiet=True)
        return str(found)
    except RunError:  # killed, or too slow: no result
        return ""


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


def _check_calls(job: Job, sample: Batch, changed: Changes, *, metrics: bool) -> str:
    """On the first rows of the sample; on all of it if the model or the loss fails on these."""
    if in_step(sample) and num_rows(sample) > FEW:
        try:
            return _check_calls_on(job, rows_between(sample, 0, FEW), changed, metrics=metrics)
        except RoundelayError:
            raise
        except Exception:  # a size that the model does not take, for example
            pass
    return _check_calls_on(job, sample, changed, metrics=metrics)


def _check_calls_on(job: Job, sample: Batch, changed: Changes, *, metrics: bool) -> str:
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

        of_loss = {change.slot.place for change in changed[1]} - {change.slot.place for change in changed[0]}
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
    if captured.metric_state and callers > 1:
        raise JobError(
            f"{captured.metric_state} and a metric reads",
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


def check_sharing(job: Job, captured: Captured) -> None:
    """Refuse parameters that share memory if the optimizer's steps differ from those on one with the summed gradient.

    Raises:
        JobError: naming both parameters and the optimizer.
    """
    for name, others in captured.sharing.items():
        names = {id(p): n for n, p in job.model.named_parameters()}
        for other in [names[id(p)] for p in others]:
            one, two = (_stepped_twice(job, (name, other), summed=summed) for summed in (False, True))
            moved = (one[1] - one[0]).abs().max()
            if (one[1] - two[1]).abs().max() > 1e-4 * moved:
                raise JobError(
                    f"parameters {name!r} and {other!r}",
                    got=f"two parameters that share memory, which {one[2]} steps one after the other",
                    expected="one parameter under two names, whose gradients are added",
                    remedy=f"Tie them as torch does: model.{other} = model.{name}, instead of an assignment to .data.",
                )


def _stepped_twice(job: Job, pair: tuple[str, str], *, summed: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
    """A weight before and after three steps with made-up gradients, and the optimizer's name.

    Args:
        job: the job.
        pair: names of two parameters that share memory.
        summed: give the first one the sum of both gradients, instead of each its own.
    """
    named = dict(without_gradients(job.model))
    first = named[pair[0]] = torch.nn.Parameter(named[pair[0]].detach().clone())
    second = named[pair[1]] = torch.nn.Parameter(first.detach())
    second.data = first.data
    before = first.detach().clone()
    optimizer = build_optimizer(job.optimizer, list(named.items()))
    draws = torch.Generator().manual_seed(0)
    for _ in range(3):
        grads = [torch.randn(before.shape, generator=draws, dtype=torch.float32).to(before.dtype) for _ in pair]
        first.grad, second.grad = (grads[0] + grads[1], None) if summed else (grads[0], grads[1])
        optimizer.step()
    return before, first.detach(), type(optimizer).__name__
