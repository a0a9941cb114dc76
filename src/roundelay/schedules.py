"""Schedules: the order of actions of every stage.

A schedule is two numbers per stage. In a *window* a stage first runs ``lag`` forwards (warm-up), then pairs of one
forward and one backward (steady), then the backwards that are left (drain). The window is one batch for the schedules
that flush, and the whole run for the asynchronous one; the update follows the last backward of every batch.

A schedule with a *delay* runs every backward in two halves. The first makes the gradients that the stage before waits
for; the second, ``W``, those of the weights, ``delay`` micro-batches later, so that it fills what would be bubble. In
``zb-h1`` (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, Sect. 2.1) stage k's delay is k: lag and delay then add
up to D - 1 on every stage, and none holds more micro-batches than stage 0 does under ``1f1b``.

::

    1f1b, D = 3, 4 micro-batches                 async-1f1b, D = 3, M = 1
    stage 0 |F0 F1 F2 B0 F3 B1 B2 B3 U0          stage 0 |F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 ...
    stage 1 |F0 F1 B0 F2 B1 F3 B2 B3 U0          stage 1 |F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 ...
    stage 2 |F0 B0 F1 B1 F2 B2 F3 B3 U0          stage 2 |F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

    zb-h1, D = 3, 4 micro-batches
    stage 0 |F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 U0
    stage 1 |F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 U0
    stage 2 |F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 U0

(The order of each stage, not yet in time.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from roundelay.errors import PlanError
from roundelay.ir.action import Action

Window = Literal["batch", "run"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule.

    Args:
        name: how a rule calls it.
        window: how far forwards may run ahead of an update: to the end of the batch, or of the run.
        lag: (stage k, stages D, micro-batches M) -> forwards that stage k runs before its first backward.
        delay: stage k -> backwards that stage k runs before its first weights' half; None where a backward is whole.
    """

    name: str
    window: Window
    lag: Callable[[int, int, int], int]
    delay: Callable[[int], int] | None = None

    @property
    def halved(self) -> bool:
        """Whether a backward is run in two halves."""
        return self.delay is not None


def _behind(stage: int, num_stages: int, micro_batches: int) -> int:
    return num_stages - 1 - stage


def _own_number(stage: int) -> int:
    return stage


def _whole_batch(stage: int, num_stages: int, micro_batches: int) -> int:
    return micro_batches


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("gpipe", "batch", _whole_batch),
    "1f1b": Schedule("1f1b", "batch", _behind),
    "zb-h1": Schedule("zb-h1", "batch", _behind, _own_number),
    "async-1f1b": Schedule("async-1f1b", "run", _behind),
}


def schedule_named(name: str) -> Schedule:
    """The schedule called ``name``.

    Raises:
        PlanError: there is none.
    """
    if name not in SCHEDULES:
        raise PlanError(
            "the schedule",
            got=repr(name),
            expected="one of " + ", ".join(SCHEDULES),
            remedy="Correct the rule's schedule.",
        )
    return SCHEDULES[name]


def actions(schedule: Schedule, stage: int, num_stages: int, counts: Sequence[int]) -> list[Action]:
    """The actions of one stage, in order.

    Args:
        schedule: which one.
        stage: k.
        num_stages: D.
        counts: micro-batches of each batch, as they turn out.
    """
    lag = schedule.lag(stage, num_stages, max(counts, default=1))
    delay = schedule.delay(stage) if schedule.delay is not None else 0
    windows = [[t] for t in range(len(counts))] if schedule.window == "batch" else [list(range(len(counts)))]
    ends = {sum(counts[: t + 1]) - 1: t for t in range(len(counts))}
    result: list[Action] = []
    start = 0
    for window in windows:
        size = sum(counts[t] for t in window)
        for i in range(size + lag + delay):
            if i < size:
                result.append(Action(stage, "F", start + i))
            if 0 <= i - lag < size:
                result.append(Action(stage, "B", start + i - lag))
            last = i - lag - delay  # behind it g's gradients are whole
            if schedule.halved and 0 <= last < size:
                result.append(Action(stage, "W", start + last))
            if 0 <= last < size and start + last in ends:
                result.append(Action(stage, "U", ends[start + last]))
        start += size
    return result
