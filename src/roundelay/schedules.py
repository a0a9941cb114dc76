"""Schedules: the order of actions of every stage.

A schedule is two numbers per stage. In a *window* a stage first runs ``lag`` forwards (warm-up), then pairs of one
forward and one backward (steady), then the backwards that are left (drain). The window is one batch for the schedules
that flush, and the whole run for the asynchronous one; the update follows the last backward of every batch.

A schedule with a *delay* runs every backward in two halves. The first makes the gradients that the stage before waits
for; the second, ``W``, those of the weights, ``delay`` micro-batches later, so that it fills what would be bubble. In
``zb-h1`` (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, Sect. 2.1) stage k's delay is k: lag and delay then add
up to D - 1 on every stage, and none holds more micro-batches than stage 0 does under ``1f1b``.

A schedule with an *order* gives each worker two stages: worker k of D has k and 2D - 1 - k of 2D, a V, so that forwards
turn at the last worker and come back. The order says how a worker's two stages take turns through a batch of M
micro-batches; a shorter batch does the same without what it does not have. In ``zb-v`` (the same paper's ZB-V) either
stage's forwards and first halves come in the order of ``1f1b`` on 2D stages, and second halves are saved up for the
batch's end, the more the nearer a worker is to the turn.

::

    1f1b, D = 3, 4 micro-batches                 async-1f1b, D = 3, M = 1
    stage 0 |F0 F1 F2 B0 F3 B1 B2 B3 U0          stage 0 |F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 ...
    stage 1 |F0 F1 B0 F2 B1 F3 B2 B3 U0          stage 1 |F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 ...
    stage 2 |F0 B0 F1 B1 F2 B2 F3 B3 U0          stage 2 |F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

    zb-h1, D = 3, 4 micro-batches
    stage 0 |F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 U0
    stage 1 |F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 U0
    stage 2 |F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 U0

    zb-v, D = 2, 3 micro-batches, a worker's second stage in small letters
    worker 0 |F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 u0 B1 W1 B2 W2 U0
    worker 1 |F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 u0 W2 U0

(The order of each worker, not yet in time.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from roundelay.errors import PlanError
from roundelay.ir.action import Action
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named

Window = Literal["batch", "run"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule.

    Args:
        name: how a rule calls it.
        window: how far forwards may run ahead of an update: to the end of the batch, or of the run.
        lag: (stage k, stages D, micro-batches M) -> forwards that stage k runs before its first backward.
        delay: stage k -> backwards that stage k runs before its first weights' half; None where a backward is whole.
        order: (worker k, workers D, micro-batches M) -> the forwards and halves of a batch on the worker's two stages,
            in order, micro-batches numbered from 0; None where a worker has one stage, and lag and delay say it all.
    """

    name: str
    window: Window
    lag: Callable[[int, int, int], int]
    delay: Callable[[int], int] | None = None
    order: Callable[[int, int, int], list[Action]] | None = None

    @property
    def halved(self) -> bool:
        """Whether a backward is run in two halves."""
        return self.delay is not None or self.order is not None

    @property
    def stages_per_worker(self) -> int:
        """How many stages a worker runs."""
        return 1 if self.order is None else 2

    def workers(self, num_stages: int) -> tuple[int, ...]:
        """For each stage the worker that runs it.

        Args:
            num_stages: of the plan; an even number where a worker has two.
        """
        return tuple(k if self.order is None else min(k, num_stages - 1 - k) for k in range(num_stages))


def _behind(stage: int, num_stages: int, micro_batches: int) -> int:
    return num_stages - 1 - stage


def _own_number(stage: int) -> int:
    return stage


def _whole_batch(stage: int, num_stages: int, micro_batches: int) -> int:
    return micro_batches


def _zb_v(worker: int, num_workers: int, micro_batches: int) -> list[Action]:
    """ZB-V: the worker's stages down and up the V take turns so that nobody waits where all three parts are equal.

    A batch of fewer than 2D - 1 micro-batches cannot fill the pipeline: it is a longer one's order, cut off.
    """
    down, up = worker, 2 * num_workers - 1 - worker
    behind = num_workers - worker
    size = max(micro_batches, 2 * num_workers - 1)
    turns = [
        *[(down, "F")] * (2 * behind - 1),  # until the first forward comes back up
        *[(up, "F"), (down, "F")] * worker,  # until the first gradient comes down
        *[(up, "FBW")] * behind,  # until it comes back
        *[(down, "FBW"), (up, "FBW")] * (size - num_workers),
        *[(down, "B"), (up, "B")] * worker,  # no forward is left: gradients first, as others wait for them
        *[(down, "BW")] * behind,
        *[(up, "W")] * worker,
        *[(down, "W")] * worker,
    ]
    done: Counter[tuple[int, str]] = Counter()
    made = []
    for stage, kinds in turns:
        for kind in kinds:
            if done[stage, kind] < micro_batches:
                made.append(Action(stage, kind, done[stage, kind]))  # type: ignore[arg-type]
            done[stage, kind] += 1
    return made


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("gpipe", "batch", _whole_batch),
    "1f1b": Schedule("1f1b", "batch", _behind),
    "zb-h1": Schedule("zb-h1", "batch", _behind, _own_number),
    "zb-v": Schedule("zb-v", "batch", _behind, order=_zb_v),
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


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that a plan's rule runs on.

    Raises:
        PlanError: there is no such rule, or no such schedule.
    """
    return schedule_named(rule_named(plan.rule).schedule)


def workers_of(plan: Plan) -> tuple[int, ...]:
    """For each stage of a plan the worker that runs it.

    Raises:
        PlanError: as :func:`schedule_of`.
    """
    return schedule_of(plan).workers(plan.num_stages)


def num_workers(plan: Plan) -> int:
    """How many workers a plan asks for: one for each stage, or for every two.

    Raises:
        PlanError: as :func:`schedule_of`.
    """
    return len(set(workers_of(plan)))


def stages_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """For each worker of a plan the stages that it runs.

    Raises:
        PlanError: as :func:`schedule_of`.
    """
    workers = workers_of(plan)
    return tuple(tuple(s for s, worker in enumerate(workers) if worker == k) for k in range(len(set(workers))))


def actions(
    schedule: Schedule,
    worker: int,
    num_stages: int,
    counts: Sequence[int],
    micro_batches: int | None = None,
    *,
    together: bool = False,
) -> list[Action]:
    """The actions of one worker, in order.

    Args:
        schedule: which one.
        worker: k; also the number of its stage, or of the first of two.
        num_stages: of the plan.
        counts: micro-batches of each batch, as they turn out.
        micro_batches: M, of a full batch; the largest of ``counts`` unless told.
        together: a worker with two stages makes their updates one after the other, behind the batch.
    """
    size = micro_batches or max(counts, default=1)
    if schedule.order is not None:
        return _through(schedule.order(worker, num_stages // 2, size), counts, together)
    stage = worker
    lag = schedule.lag(stage, num_stages, size)
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


def _through(order: Sequence[Action], counts: Sequence[int], together: bool) -> list[Action]:
    """An order through every batch, each as long as it is, with updates behind a stage's last second half, or all."""
    result, start = [], 0
    for t, count in enumerate(counts):
        for action in order:
            if action.number < count:
                result.append(Action(action.stage, action.kind, start + action.number))
                if action.kind == "W" and action.number + 1 == count and not together:
                    result.append(Action(action.stage, "U", t))
        result += [Action(stage, "U", t) for stage in sorted({a.stage for a in order}) if together]
        start += count
    return result
