"""Looks at what a person's code keeps from call to call, where capture has seen it change something."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from roundelay.errors import JobError, RunError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, in_step, num_rows, replace, split
from roundelay.frontend.cross_call_state import refuse_state
from roundelay.frontend.export_adapter import default_inputs
from roundelay.frontend.loss_metrics import split as without_metrics
from roundelay.frontend.reachable_state import Change, ReachableState
from roundelay.frontend.source_lines import users_line
from roundelay.job import Job, Peekable
from roundelay.runtime.forked_call import isolated
from roundelay.runtime.stage_optimizer import build_optimizer, without_gradients

_GENERATORS: tuple[tuple[str, Any], ...] = (
    ("random", random._inst),
    ("numpy.random", np.random.mtrand._rand),
    ("torch", torch.default_generator),
)

LIMIT_S = 120.0
"""Seconds that the calls may take in all."""


def world_of(job: Job) -> ReachableState:
    """All that the person's model and functions reach, and the generators of random numbers that there are anyway.

    Batches are not among them: they are read once, and go on.
    """
    functions = (("loss", job.loss), ("inputs", job.inputs), ("optimizer", job.optimizer), ("scheduler", job.scheduler))
    roots = [("model", job.model), *((name, call) for name, call in functions if call is not None)]
    return ReachableState([*roots, *_GENERATORS], job.model)


@contextmanager
def untouched(job: Job) -> Iterator[None]:
    """The person's objects are as they were behind the block, but for buffers that a first forward has made.

    What capture and measuring call of a job keeps no trace of it: not in the attributes of its model, not in what its
    loss counts, not in tensors and lists that its functions fill, not in what they draw by. No batch is read inside.
    """
    world = world_of(job)
    try:
        yield
    finally:
        world.restore(apart=("buffer", "parameter"))


@contextmanager
def refusing_calls(model: torch.nn.Module) -> Iterator[None]:
    """Refuse data that ask the model that is trained, in whatever thread: they would get weights of another time.

    Raises:
        JobError: it is called in this block.
    """
    own = set(model.modules())

    def refuse(module: torch.nn.Module, _: Any) -> None:
        if module in own:
            raise JobError(
                f"batches(epoch), which calls the model{users_line()}",
                got="data that depend on the weights",
                expected="the same data whatever the weights are: they are read ahead, while stages train their own",
                remedy="Weigh or mask rows in the loss, where outputs are those of the newest weights; or choose rows "
                "between runs: train an epoch, and go on with --from RUN.",
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def check_stateless(job: Job, captured: Captured, sample: Batch) -> None:
    """Refuse a model or a loss whose next call reads what the last one has left.

    Only those are called whose capture has changed a slot: in a child, so that nobody sees it.

    Raises:
        CaptureError: the forward does.
        JobError: the loss does.
    """
    changed = captured.changed
    if any(changed) and not any(parameter.is_meta for parameter in job.model.parameters()):
        _look_apart(job, sample, changed)
    _check_apart(job, (*changed[0], *changed[1]))


def check_reused(job: Job, captured: Captured, *, batches: int | None, epochs: int | None) -> None:
    """Refuse what writes into tensors that ``batches`` gives again, written into, in the next epoch.

    Args:
        job: the job.
        captured: its model.
        batches: how many the run makes; None: by epochs.
        epochs: how many it makes of these; None: by batches.

    Raises:
        JobError: the run comes so far.
    """
    opened = job.batches.opened if isinstance(job.batches, Peekable) else None
    source = getattr(opened, "source", None)
    if not any(captured.writes) or not isinstance(source, (list, tuple)):
        return
    again = (batches is not None and batches > len(source)) or (batches is None and (epochs or 1) > 1)
    if again and job.batches.batches(0) is source:  # type: ignore[attr-defined]
        who = "Job(inputs=...)" if captured.writes[0] else "the model's forward"
        raise JobError(
            f"batch field {[*captured.writes[0], *captured.writes[1]][0]!r}, which {who} writes into",
            got="a tensor of a list that is given again in the next epoch: plain PyTorch goes on with what was written",
            expected="data that are the same in every epoch",
            remedy="Write into a copy, x = x.clone(), or compute a new tensor: x / 255 in the place of x.div_(255).",
        )


def _look_apart(job: Job, sample: Batch, changed: tuple[tuple[Change, ...], tuple[Change, ...]]) -> None:
    def look() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # what the person's code prints
            os.dup2(nowhere, stream)
        _look(job, sample, changed)

    if hasattr(os, "fork"):
        try:
            isolated(look, "looking for what the model keeps from call to call", limit_s=LIMIT_S)
        except RunError:  # it was killed, or took too long; what it looked for is not known
            return
    else:
        _look(job, sample, changed)


def _check_apart(job: Job, changes: Sequence[Change]) -> None:
    """Refuse data that read what the forward or the loss sets: these are in other processes, and later."""
    if not changes:
        return
    given = job.batches.batches if isinstance(job.batches, Peekable) else job.batches
    world = ReachableState([("batches", given)])
    names = world.names_read()
    for change in changes:
        if change.slot.place in world.slots and change.slot.name in names:
            raise JobError(
                f"{change.slot.path}, which the model or the loss sets and batches(epoch) can read",
                got="data that depend on the training",
                expected="the same data whatever was trained before: they are read ahead",
                remedy="Let what varies with the training be computed in the loss or in forward, from the batch.",
            )


def _look(job: Job, sample: Batch, changed: tuple[tuple[Change, ...], tuple[Change, ...]]) -> None:
    def call(rows: Batch) -> Any:
        batch = replace(rows, lambda _, leaf: leaf.clone())
        args, kwargs = (job.inputs or default_inputs)(batch)
        value, _ = without_metrics(job.loss(job.model(*args, **kwargs), batch))
        return value  # what it is trained by: a metric may go on from call to call

    with torch.random.fork_rng(devices=[]):

        def other() -> Any:
            try:
                return _elsewhere(job.model, call, _fewer(sample))
            except Exception:  # a state of as many rows as a batch has, for example
                return _elsewhere(job.model, call, _reversed(sample))

        of_loss = {change.slot.place for change in changed[1]} - {change.slot.place for change in changed[0]}
        roots = [("model", job.model), ("loss", job.loss)]
        refuse_state(job.model, lambda: call(sample), other, roots, of_loss)


def _elsewhere(model: torch.nn.Module, call: Callable[[Batch], Any], sample: Batch) -> Any:
    """A call on another batch, from other weights: an average of weights stays what it is while they do."""
    weights = [(weight, weight.detach().clone()) for weight in model.parameters()]
    try:
        for weight, _ in weights:
            if weight.is_floating_point():
                weight.data.mul_(1.125)
        return call(sample)
    finally:
        for weight, value in weights:
            weight.data.copy_(value)


def _fewer(sample: Batch) -> Batch:
    """A batch unlike the sample: half of its rows; or another of as many, where it has no four."""
    if in_step(sample) and num_rows(first := split(sample, 2)[0]) > 1:
        return first
    return _reversed(sample)


def _reversed(sample: Batch) -> Batch:
    """A batch unlike the sample, of the same sizes: its rows in another order, its numbers larger."""

    def other(_: str, leaf: torch.Tensor) -> torch.Tensor:
        turned = leaf.flip(0) if leaf.ndim else leaf
        return turned * 1.25 if leaf.is_floating_point() else turned

    return replace(sample, other)


def check_sharing(job: Job, captured: Captured) -> None:
    """Refuse parameters in one memory that the optimizer steps otherwise than one parameter with both gradients.

    Raises:
        JobError: naming both, and the optimizer.
    """
    for name, others in captured.sharing.items():
        names = {id(p): n for n, p in job.model.named_parameters()}
        for other in [names[id(p)] for p in others]:
            one, two = (_stepped_twice(job, (name, other), summed=summed) for summed in (False, True))
            moved = (one[1] - one[0]).abs().max()
            if (one[1] - two[1]).abs().max() > 1e-4 * moved:
                raise JobError(
                    f"parameters {name!r} and {other!r}",
                    got=f"two parameters in one memory, which {one[2]} steps one after the other",
                    expected="one parameter under two names, whose gradients are added",
                    remedy=f"Tie them as torch does: model.{other} = model.{name}, instead of an assignment to .data.",
                )


def _stepped_twice(job: Job, pair: tuple[str, str], *, summed: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
    """A weight before and after three steps with made-up gradients, and the optimizer's name.

    Args:
        job: the job.
        pair: names of two parameters in one memory.
        summed: give the first one both gradients, not each its own.
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
