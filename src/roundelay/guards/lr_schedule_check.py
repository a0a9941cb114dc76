"""Checks that the job's optimizer and scheduler functions return the same at every call.

Every stage calls them, and more copies run ahead of the training to predict and to show the rates. A function that
counts its calls, or draws random numbers, returns something else each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.job import Job
from roundelay.reach.reachable_state import Change, ReachableState
from roundelay.runtime.optimizer.optimizer_side_effects import source_location
from roundelay.runtime.optimizer.stage_optimizer import RateTable, without_gradients

AHEAD = 64
"""Updates over which two schedules are compared."""

_PLAIN = (int, float, bool, str, type(None), tuple)


def check_reproducible(job: Job) -> RateTable:
    """Refuse an optimizer or a scheduler that differs when its function is called again; returns the first one's rates.

    Raises:
        JobError: naming the option, or the scheduler with its functions and the first update whose rate differs; or
            the optimizer or scheduler cannot be used.
    """
    functions = (("loss", job.loss), ("inputs", job.inputs))
    world = ReachableState(
        [("model", job.model), *((name, call) for name, call in functions if call is not None)], job.model
    )
    first = RateTable(job.optimizer, job.scheduler, without_gradients(job.model))
    rates = [first.at(update) for update in range(AHEAD if first.scheduled else 1)]
    if first.scheduled and (changes := world.changes()):
        raise _changed_by_schedule(first.scheduler, changes[0])
    second = RateTable(job.optimizer, job.scheduler, without_gradients(job.model))  # after all calls of the first
    _check_options(job, first.group_options, second.group_options)
    for update, rate in enumerate(rates):
        if (now := second.at(update)) != rate and repr(now) != repr(rate):
            raise JobError(
                f"Job(scheduler=...), {_describe(first.scheduler)}"
                if first.scheduled
                else f"Job(optimizer=...), {first.kinds[0]}",
                got=f"{_text(now)} at update {update}, where the schedule made before had {_text(rate)}",
                expected="the same rates at every call: every stage has a scheduler, and others run ahead of it",
                remedy="Compute the rate from the update number that the function gets. Keep what it must count in an "
                "object that scheduler=... creates at each call.",
            )
    return first


def _changed_by_schedule(scheduler: Any, change: Change) -> JobError:
    return JobError(
        f"Job(scheduler=...), {_describe(scheduler)}",
        got=f"a schedule that changes {change.slot.path}, which the model, the loss or inputs can read",
        expected="one that changes only learning rates: every stage steps one, and others run ahead of it",
        remedy="Pass what varies from update to update as a tensor in the batch, or keep a count in a buffer of the "
        'model, self.register_buffer("n", torch.tensor(0)), and self.n = self.n + 1 in forward.',
    )


def _check_options(job: Job, first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> None:
    if len(first) != len(second):
        raise _differs(job, f"{len(second)} parameter groups, and {len(first)} at its first call")
    for i, (before, now) in enumerate(zip(first, second, strict=True)):
        for key in {**before, **now}:
            old, new = before.get(key), now.get(key)
            if isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and repr(old) != repr(new):
                raise _differs(job, f"{key} = {new!r:.60} in group {i}, and {old!r:.60} at its first call")


def _differs(job: Job, got: str) -> JobError:
    return JobError(
        f"Job(optimizer=...), {source_location(job.optimizer)}",
        got=got,
        expected="the same optimizer at each call: every stage calls the function",
        remedy="Let the function depend only on its argument, not on how often it was called or on random numbers.",
    )


def _text(rates: Sequence[float]) -> str:
    return "lr " + ", ".join(f"{rate:g}" for rate in rates[:4])


def _describe(scheduler: Any) -> str:
    """A scheduler's class and the user's functions in it."""
    functions = [source_location(function) for function in _functions(scheduler)]
    return type(scheduler).__name__ + (" with " + ", ".join(dict.fromkeys(functions)) if functions else "")


def _functions(scheduler: Any) -> Iterator[Callable[..., Any]]:
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _functions(inner)
    yield from (function for function in getattr(scheduler, "lr_lambdas", ()) if callable(function))
    if not hasattr(torch.optim.lr_scheduler, type(scheduler).__name__):
        yield type(scheduler).get_lr
