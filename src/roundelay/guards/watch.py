"""Watches over the person's objects while their code is called, for trial or by the loader of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from roundelay.errors import JobError
from roundelay.frontend.export.gradient_hooks import hooks_of, uncalled
from roundelay.job import Job
from roundelay.reach.reachable_state import DEFAULT_GENERATORS, ReachableState
from roundelay.reach.source_lines import users_line
from roundelay.runtime.processes.discarded_writes import discarding_writes


def reachable_state_of(job: Job) -> ReachableState:
    """The state that the user's model and functions can reach, and the default random number generators.

    Data loaders are not included: they are read once.
    """
    functions = (("loss", job.loss), ("inputs", job.inputs), ("optimizer", job.optimizer), ("scheduler", job.scheduler))
    hooks = [("hook", hook) for of_parameter in hooks_of(job.model).values() for hook in of_parameter]
    roots = [("model", job.model), *hooks, *((name, call) for name, call in functions if call is not None)]
    return ReachableState([*roots, *DEFAULT_GENERATORS], job.model)


@contextmanager
def preserving_state(job: Job, *, hooks: bool = True) -> Iterator[None]:
    """Restore the user's objects after the block, except for buffers that a first forward has created.

    Calls by capture and profiling leave no trace: not in the model's attributes, in counters of the loss, in tensors
    and lists that functions fill, nor in random number generators, nor in open files. The block must not read a batch.

    Args:
        job: whose objects are restored.
        hooks: those on gradients may be called in the block.
    """
    state = reachable_state_of(job)
    try:
        with discarding_writes(state.files()), nullcontext() if hooks else uncalled(job.model):
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
