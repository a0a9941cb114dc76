"""A schedule as data: the body of every worker's loop, and which stages a worker runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from roundelay.errors import PlanError
from roundelay.ir.action import Action
from roundelay.ir.program import Window

ONCE_A_BATCH, HANDING_ON = "ATU", "RDhHpP"
"""Kinds of actions that act on a batch, and those that no order of computing depends on."""


@dataclass(frozen=True, slots=True)
class Body:
    """The body of one worker's loop; see :mod:`roundelay.ir.program`.

    Args:
        every: K, micro-batches from one turn to the next.
        actions: forwards, backwards and weight halves, each with an offset in the place of its micro-batch; what is
            done once a batch has that of the batch's last, where the schedule says where it stands.
    """

    every: int
    actions: tuple[Action, ...]

    def over(self, count: int) -> Iterator[Action]:
        """The actions in a window of ``count`` micro-batches, which are numbered from 0."""
        offsets = [action.number for action in self.actions]
        for turn in range(-(max(offsets) // self.every), (count - 1 - min(offsets)) // self.every + 1):
            for action in self.actions:
                number = turn * self.every + action.number
                if 0 <= number < count:
                    yield Action(action.stage, action.kind, number)

    def last_of_all(self, kind: str) -> set[int]:
        """Places of the actions of a kind after which all of the worker's stages have done it for a micro-batch."""
        last: dict[int, int] = {}
        for place, action in enumerate(self.actions):
            other = last.get(action.number % self.every)
            if action.kind == kind and (other is None or action.number <= self.actions[other].number):
                last[action.number % self.every] = place  # a smaller offset comes in a later turn
        return set(last.values())

    def peak(self, window: Window, micro_batches: int, more: str, less: str) -> int:
        """How often ``more`` is at most ahead of ``less``: tapes are forwards ahead of their backwards."""
        offsets = [action.number for action in self.actions]
        count = micro_batches if window == "batch" else max(offsets) - min(offsets) + 2 * self.every
        change = {more: 1, less: -1}
        return max(accumulate(change.get(action.kind, 0) for action in self.over(count)))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule.

    Args:
        name: as rules call it.
        window: how far forwards may run ahead of an update: to the end of the batch, or of the run.
        body: (stages of the worker, D stages, M micro-batches of a batch) -> the body of its loop.
        halved: whether a backward runs in two halves: the gradients of the inputs, then those of the weights.
        stages_per_worker: how many stages a worker runs; 0 for all.
        place: number of stages -> for each the worker that runs it; what the planner suggests.
        updates: whether the bodies say where updates stand; else they follow the last backward of their batch.
        free: whether the bodies say nothing of the order: what can run does.
    """

    name: str
    window: Window
    body: Callable[[Sequence[int], int, int], Body]
    halved: bool = False
    stages_per_worker: int = 1
    place: Callable[[int], tuple[int, ...]] = lambda num_stages: tuple(range(num_stages))
    updates: bool = False
    free: bool = False

    @property
    def last_kind(self) -> str:
        """The kind of action after which a micro-batch's gradients are complete on a stage."""
        return "W" if self.halved else "B"

    def groups(self, num_stages: int) -> frozenset[tuple[int, ...]]:
        """The sets of stages that share a worker."""
        workers = self.place(num_stages)
        return frozenset(tuple(s for s in range(num_stages) if workers[s] == worker) for worker in workers)


SCHEDULES: dict[str, Schedule] = {}


def register_schedule(schedule: Schedule) -> None:
    """Make a schedule known by its name.

    Raises:
        PlanError: another one has this name.
    """
    if SCHEDULES.setdefault(schedule.name, schedule) is not schedule:
        raise PlanError(
            f"schedule {schedule.name!r}",
            got="a second schedule of this name",
            expected="a name other than " + ", ".join(SCHEDULES),
            remedy="Register it under another name.",
        )


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


def actions(
    schedule: Schedule,
    stages: Sequence[int],
    num_stages: int,
    counts: Sequence[int],
    micro_batches: int | None = None,
    *,
    together: bool = False,
) -> list[Action]:
    """The actions of one worker, in order, its updates among them.

    Args:
        schedule: which one.
        stages: of the worker.
        num_stages: D, of the plan.
        counts: micro-batches of each batch, as they turn out.
        micro_batches: M, of a full batch; the largest of ``counts`` by default.
        together: the updates of a worker's stages follow one another, after the last of their backwards.
    """
    body = schedule.body(stages, num_stages, micro_batches or max(counts, default=1))
    ends = {end - 1: t for t, end in enumerate(accumulate(counts))}
    result: list[Action] = []
    start = 0
    for count in counts if schedule.window == "batch" else [sum(counts)]:
        complete: dict[int, list[int]] = {}
        for action in body.over(count):
            g = start + action.number
            if action.kind in HANDING_ON:
                continue
            if action.kind in ONCE_A_BATCH:
                result += [Action(action.stage, action.kind, ends[g])] if g in ends else []
                continue
            result.append(Action(action.stage, action.kind, g))
            if action.kind == schedule.last_kind and g in ends and not schedule.updates:
                done = complete.setdefault(g, [])
                done.append(action.stage)
                if not together:
                    result.append(Action(action.stage, "U", ends[g]))
                elif len(done) == len(stages):
                    result += [Action(stage, "U", ends[g]) for stage in sorted(done)]
        start += count
    return result
