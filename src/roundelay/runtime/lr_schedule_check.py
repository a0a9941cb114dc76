"""Whether an optimizer and a schedule of rates are the same whenever they are made.

Every stage makes its own, and others are run ahead of the training to foresee and to show the rates. A function that
counts its calls, or draws, says something else to each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.frontend.reachable_state import Change, ReachableState
from roundelay.job import Job
from roundelay.runtime.optimizer_side_effects import place_of
from roundelay.runtime.stage_optimizer import RateTable, without_gradients

AHEAD = 64
"""Updates that both schedules are run ahead."""

_PLAIN = (int, float, bool, str, type(None), tuple)


def check_made_alike(job: Job) -> RateTable:
    """Refuse an optimizer or a scheduler that is another one when it is made again; the rates of its first making.

    Raises:
        JobError: naming the option, or the scheduler with its functions and the first update whose rate differs; or
            they cannot be used.
    """
    functions = (("loss", job.loss), ("inputs", job.inputs))
    world = ReachableState(
        [("model", job.model), *((name, call) for name, call in functions if call is not None)], job.model
    )
    one = RateTable(job.optimizer, job.scheduler, without_gradients(job.model))
    rates = [one.at(update) for update in range(AHEAD if one.scheduled else 1)]
    if one.scheduled and (changes := world.changes()):
        raise _told_by_schedule(one.scheduler, changes[0])
    two = RateTable(job.optimizer, job.scheduler, without_gradients(job.model))  # behind all calls of the first
    _check_options(job, one.made_with, two.made_with)
    for update, rate in enumerate(rates):
        if (now := two.at(update)) != rate and repr(now) != repr(rate):
            raise JobError(
                f"Job(scheduler=...), {_who(one.scheduler)}"
                if one.scheduled
                else f"Job(optimizer=...), {one.kinds[0]}",
                got=f"{_told(now)} at update {update}, where the schedule that was made before said {_told(rate)}",
                expected="the same rates whenever it is made: every stage makes one, and others are run ahead of it",
                remedy="Compute the rate from the update that the function is given. What it must count, let it keep "
                "in an object that scheduler=... makes anew at each call.",
            )
    return one


def _told_by_schedule(scheduler: Any, change: Change) -> JobError:
    return JobError(
        f"Job(scheduler=...), {_who(scheduler)}",
        got=f"a schedule that changes {change.slot.path}, which the model, the loss or inputs can read",
        expected="one that changes learning rates alone: every stage steps one, and others are run ahead of it",
        remedy="Give what varies from update to update as a tensor in the batch, or keep a count in a buffer of the "
        'model, self.register_buffer("n", torch.tensor(0)), and self.n = self.n + 1 in forward.',
    )


def _check_options(job: Job, one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> None:
    if len(one) != len(two):
        raise _another(job, f"{len(two)} parameter groups, and {len(one)} at its first call")
    for i, (before, now) in enumerate(zip(one, two, strict=True)):
        for key in {**before, **now}:
            old, new = before.get(key), now.get(key)
            if isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and repr(old) != repr(new):
                raise _another(job, f"{key} = {new!r:.60} in group {i}, and {old!r:.60} at its first call")


def _another(job: Job, got: str) -> JobError:
    return JobError(
        f"Job(optimizer=...), {place_of(job.optimizer)}",
        got=got,
        expected="the same optimizer at each call: every stage makes one",
        remedy="Let the function depend on its argument alone, not on how often it was called or on what was drawn.",
    )


def _told(rates: Sequence[float]) -> str:
    return "lr " + ", ".join(f"{rate:g}" for rate in rates[:4])


def _who(scheduler: Any) -> str:
    """A scheduler's class, with the person's functions in it."""
    functions = [place_of(function) for function in _functions(scheduler)]
    return type(scheduler).__name__ + (" with " + ", ".join(dict.fromkeys(functions)) if functions else "")


def _functions(scheduler: Any) -> Iterator[Callable[..., Any]]:
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _functions(inner)
    yield from (function for function in getattr(scheduler, "lr_lambdas", ()) if callable(function))
    if not hasattr(torch.optim.lr_scheduler, type(scheduler).__name__):
        yield type(scheduler).get_lr
