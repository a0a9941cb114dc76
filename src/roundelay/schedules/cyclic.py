"""The four forms of cyclic data parallelism (Fournier, Oyallon, "Cyclic Data Parallelism", 2024, Sect. 3.2 and 4).

N micro-batches of a batch go through S stages, each starting 2S/N steps after the one before; a step is one forward or
backward of a stage, and a batch takes 2S steps. The forms differ in who computes what:

=========== =========================================================================================
``single``  one worker all micro-batches, in turns
``dp``      worker i micro-batch i, all stages; gradients go from worker to worker as they arise
``mp``      each worker one stage, of which ceil(N (S - k) / S) workers take the micro-batches in turns
``zero``    worker i micro-batch i, all stages; each stage's state goes from worker to worker, where it is needed
=========== =========================================================================================

::

    cdp-v2, N = S = 3, the second worker of dp (A: adds to the sum of the workers before, T: gets the total)
    |F0 T1 U1 F1 T2 U2 F2 B2 A2 B1 A1 B0 A0 T0 U0
    (Letters with stages; T and U are of the batch before.)

In ``zero``, ceil(S / N) neighbouring stages make a group, and a time slot is as long as a forward or backward of one:
worker i is at group G in the slots 2i + G, forward, and 2i + 2N - 1 - G, backward, so that in each slot every worker is
at another group.

A rule's table says which forwards read W[t]. An update comes right before the first of the worker's forwards that does,
or, if none does, after its last backward: so a worker that has one micro-batch needs one version of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from roundelay.ir.action import Action, Kind
from roundelay.schedules.schedule import Body, Schedule

Table = Callable[[int, int], bool]
"""From a micro-batch i and a stage k, both from 0, to whether the forward reads W[t] and not W[t-1]."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Whose loop it is.

    Args:
        holder: its number among the holders of its stages.
        size: N, micro-batches of a batch.
        fresh: the rule's table.
        together: whether the updates of its stages wait for the gradients of all of them.
    """

    holder: int
    size: int
    fresh: Table
    together: bool


def holders_of(stage: int, num_stages: int, size: int) -> int:
    """How many workers of ``mp`` share a stage: as many as micro-batches hold activations of it at one time."""
    return -(-size * (num_stages - stage) // num_stages)


def _single(seat: Seat, stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """All micro-batches on one worker, in the order of time; of two at one time, the backward first."""
    size, period = seat.size, 2 * num_stages
    timed: list[tuple[Fraction, bool, Action]] = []
    for i in range(size):
        for step in range(period):
            turns, at = divmod(Fraction(period * i, size) + step, period)
            forward = step < num_stages
            stage = step if forward else period - 1 - step
            timed.append((at, forward, Action(stage, "F" if forward else "B", i - turns * size)))
    actions = [action for _, _, action in sorted(timed, key=lambda one: one[:2])]
    return Body(size, tuple(updated for action in actions for updated in _then_updated(action, size)))


def _then_updated(action: Action, size: int) -> Iterator[Action]:
    yield action
    if action.kind == "B" and (action.number + 1) % size == 0:
        yield Action(action.stage, "U", action.number)


def _replicated(seat: Seat, stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """One micro-batch of each batch on each worker, which all have all stages."""
    last = seat.holder == seat.size - 1
    rounds = [_Round(k, (0,), (seat.fresh(seat.holder, k),), 0, 1, last, last) for k in stages]
    halves = [_passes(one)[0] for one in rounds]
    forwards = [action for before, _ in halves for action in before]
    made = [*forwards, *(action for _, after in reversed(halves) for action in after)]
    if seat.together:  # after all sums; the last worker has room for one total, so it does not wait for its next batch
        updates = sorted([action for action in made if action.kind == "U"], key=lambda action: action.stage)
        made = [action for action in made if action.kind not in ("UT" if last else "U")]
        made += [*(Action(k, "T", 0) for k in stages), *(Action(k, "U", 0) for k in stages)] if last else updates
    return _dealing(seat, made)


def _dealing(seat: Seat, actions: Sequence[Action]) -> Body:
    """The loop of a worker that has one micro-batch of each batch, the first of which hands the others out.

    Worker i gets its micro-batch when the first one has done i/N of its batch: so each starts as much later.
    """
    steps, result = [action for action in actions if action.kind in "FB"], list(actions)
    for i in reversed(range(1, seat.size if seat.holder == 0 else 1)):
        done = len(steps) * i // seat.size
        result.insert(result.index(steps[done - 1]) + 1 if done else 0, Action(0, "D", 0))
    return Body(1, (Action(0, "R", 0), *result))


def _dealt(seat: Seat, stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """One stage on each worker; its holders take micro-batches in turns, and whose turn it is shifts with the batch."""
    (stage,), size = stages, seat.size
    holders = holders_of(stage, num_stages, size)
    turn = math.lcm(holders, size)
    actions: list[Action] = []
    for start in range(0, turn, size):
        own, end = [g for g in range(start, start + size) if g % holders == seat.holder], start + size - 1
        ends = [g % holders == seat.holder for g in (end - size, end)]
        one = _Round(stage, tuple(own), tuple([seat.fresh(g % size, stage) for g in own]), end, size, *ends)
        actions += [action for halves in _passes(one) for half in halves for action in half]
    return Body(turn, tuple(actions))


@dataclass(frozen=True, slots=True)
class _Round:
    """What a worker does of one batch on one stage.

    Args:
        stage: k.
        own: its micro-batches.
        fresh: whether the forward of each reads W[t].
        end: the batch's last micro-batch, by which sums and updates are numbered.
        size: micro-batches from the end of one batch to that of the next.
        had: whether it has summed the total of the batch before, so that nobody needs to share it.
        last: whether it sums the total of this one.
    """

    stage: int
    own: tuple[int, ...]
    fresh: tuple[bool, ...]
    end: int
    size: int
    had: bool
    last: bool


Halves = tuple[list[Action], list[Action]]
"""The actions of one micro-batch up to its forward, and from its backward on."""


def _passes(one: _Round) -> list[Halves]:
    """The actions of a round, by micro-batch.

    The total of the batch before is shared, and the update made, before the first forward that reads W[t]; if none
    does, the update comes after the last backward. A total of others is shared after the first backward at the latest.
    """
    end, first_fresh = len(one.own) - 1, one.fresh.index(True) if True in one.fresh else len(one.own)
    shared, updated = (Action(one.stage, kind, one.end - one.size) for kind in ("T", "U"))
    at = min(first_fresh, end) if one.had else 0  # where the sharing stands
    passes: list[Halves] = []
    for n, g in enumerate(one.own):
        early = [shared] * (n == at == first_fresh) + [updated] * (n == first_fresh)
        late = [shared] * (n == at != first_fresh) + [updated] * (n == end < first_fresh)
        summed = [Action(one.stage, "A", one.end)] * (n == end)
        closing = [*late, *summed] if one.had or one.last else [*summed, *late]  # there is room for one total
        passes.append(([*early, Action(one.stage, "F", g)], [Action(one.stage, "B", g), *closing]))
    return passes


def _moving_states(seat: Seat, stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """One micro-batch of each batch on each worker, with the states of stages handed from worker to worker.

    An update is made by the first worker that a stage's state comes to after the batch's last backward.
    """
    actions: list[Action] = []
    for stage in stages:
        route = StateRoute(stage, num_stages, seat.size)
        before = [Action(stage, "T", -1), Action(stage, "U", -1)] if route.updater == seat.holder else []
        actions += [*route.held("h", seat.holder), *before, Action(stage, "F", 0), *route.passed("p", seat.holder)]
    for stage in reversed(stages):
        route = StateRoute(stage, num_stages, seat.size)
        done = Action(stage, "B", 0), Action(stage, "A", 0)
        actions += [*route.held("H", seat.holder), *done, *route.passed("P", seat.holder)]
    return _dealing(seat, actions)


@dataclass(frozen=True, slots=True)
class StateRoute:
    """Where the state of a stage goes in ``zero``.

    Args:
        stage: k.
        num_stages: S.
        size: N, workers.
    """

    stage: int
    num_stages: int
    size: int

    @property
    def group(self) -> int:
        """The group of stages that the stage is of; the last group is full."""
        return self.size - 1 - (self.num_stages - 1 - self.stage) // -(-self.num_stages // self.size)

    @property
    def updater(self) -> int:
        """The worker that makes the stage's updates, and keeps its optimizer's state."""
        return self.size - 1 - self.group

    @property
    def start(self) -> int:
        """The worker that has the state in slot 0."""
        return next(
            w for w in range(self.size) if any(self.slot(back, w) % (2 * self.size) == 0 for back in (False, True))
        )

    def slot(self, back: bool, worker: int) -> int:
        """The time slot of a worker's forward, or backward, of the first batch."""
        return 2 * worker + (2 * self.size - 1 - self.group if back else self.group)

    def following(self, back: bool, worker: int) -> tuple[int, int]:
        """Who needs the state after a worker's backward, for a forward, or after its forward, for a backward.

        Returns:
            The worker, and of how many batches later.
        """
        other = (worker - self.group if back else worker + self.group + 1) % self.size
        slots = self.slot(back, worker) + 1 - self.slot(not back, other)
        return other, slots // (2 * self.size)

    def within(self, back: bool, worker: int) -> tuple[int, int]:
        """By how many batches a worker gets the state beyond the first and the last batch.

        The way begins in slot 0, and ends with the update of the last batch.
        """
        slot, period = self.slot(back, worker), 2 * self.size
        end = period + self.slot(False, self.updater)  # of the update, a period later than the batch's slots
        return -((slot - 1) // period), (end - slot) // period

    def held(self, kind: Kind, worker: int) -> list[Action]:
        """Waiting for the state before a forward (``h``) or backward (``H``), unless the worker has it."""
        back = kind == "H"
        source = next(w for w in range(self.size) if self.following(not back, w)[0] == worker)
        return [] if source == worker else [Action(self.stage, kind, 0)]

    def passed(self, kind: Kind, worker: int) -> list[Action]:
        """Handing the state on after a forward (``p``) or backward (``P``), numbered as whoever gets it does."""
        other, later = self.following(kind == "P", worker)
        return [] if other == worker else [Action(self.stage, kind, later)]


def _simultaneous(seat: Seat, stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """All micro-batches together, stage by stage."""
    numbers = range(micro_batches)
    forwards = [Action(stage, "F", i) for stage in stages for i in numbers]
    return Body(micro_batches, (*forwards, *(Action(stage, "B", i) for stage in reversed(stages) for i in numbers)))


def _accumulating(seat: Seat, stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """One micro-batch after the other."""
    return Body(1, (*(Action(k, "F", 0) for k in stages), *(Action(k, "B", 0) for k in reversed(stages))))


def _synchronous(seat: Seat, stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """One micro-batch on each replica; gradients are exchanged while earlier stages' backwards go on, as DDP does."""
    dealt = [Action(0, "D", 0)] * (seat.size - 1 if seat.holder == 0 else 0)
    computed = _accumulating(seat, stages, num_stages, micro_batches).actions
    ordered = stages if seat.together else reversed(stages)  # stage 0 sends the norm that others wait for
    return Body(1, (Action(0, "R", 0), *dealt, *computed, *(Action(stage, "U", 0) for stage in ordered)))


def laid_out(form: Form, seat: Seat) -> Schedule:
    """The schedule of a form, with the loop of one worker.

    Args:
        form: one of :data:`LAYOUTS` or :data:`SYNCHRONOUS`.
        seat: whose loop it is.
    """
    return Schedule(
        form.name,
        "slots" if form.staggered else "batch",
        partial(form.body, seat),
        stages_per_worker=form.stages_per_worker,
        place=form.place,
        updates=form.updates,
    )


@dataclass(frozen=True, slots=True)
class Form:
    """How micro-batches and stages lie on workers, and in which order.

    Args:
        name: of its schedule.
        body: makes a worker's loop.
        place: number of stages -> for each the worker of a replica that runs it.
        stages_per_worker: how many stages a worker runs; 0 for all.
        replicates: whether each micro-batch has a replica of the pipeline.
        takes_turns: whether the holders of a stage take micro-batches in turns.
        sums: whether they sum gradients over time.
        moves_states: whether the states of stages go from holder to holder.
        staggered: whether micro-batches start one after another; else all together.
        updates: as in :class:`~roundelay.schedules.schedule.Schedule`.
    """

    name: str
    body: Callable[[Seat, Sequence[int], int, int], Body]
    place: Callable[[int], tuple[int, ...]] = lambda num_stages: (0,) * num_stages
    stages_per_worker: int = 0
    replicates: bool = False
    takes_turns: bool = False
    sums: bool = False
    moves_states: bool = False
    staggered: bool = True
    updates: bool = True


PIPELINE = "pipeline"
"""The layout of the rules' own schedules."""

LAYOUTS = {
    "single": Form("cyclic-single", _single),
    "dp": Form("cyclic-dp", _replicated, replicates=True, sums=True),
    "mp": Form(
        "cyclic-mp",
        _dealt,
        place=lambda num_stages: tuple(range(num_stages)),
        stages_per_worker=1,
        takes_turns=True,
        sums=True,
    ),
    "zero": Form("cyclic-zero", _moving_states, replicates=True, sums=True, moves_states=True),
}
"""The forms of cyclic data parallelism, by name of the layout."""

_AT_ONCE: dict[str, Any] = {"staggered": False, "updates": False}

SYNCHRONOUS = {
    ("single", "gpipe"): Form("gpipe-single", _simultaneous, **_AT_ONCE),
    ("single", "1f1b"): Form("1f1b-single", _accumulating, **_AT_ONCE),
    ("dp", "gpipe"): Form("gpipe-dp", _synchronous, replicates=True, staggered=False),
    ("dp", "1f1b"): Form("1f1b-dp", _synchronous, replicates=True, staggered=False),
}
"""What the forms are compared with, by layout and the rule's schedule: all micro-batches together, or, on one worker
and by ``1f1b``, one after the other (gradient accumulation)."""
