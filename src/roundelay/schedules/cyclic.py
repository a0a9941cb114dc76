"""The four forms of cyclic data parallelism (Fournier, Oyallon, "Cyclic Data Parallelism", 2024, Sect. 3.2 and 4).

N micro-batches of a batch go through S stages, each starting 2S/N steps after the one before; a step is one forward or
backward of a stage, and a batch takes 2S steps. The forms differ in who computes what:

=========== =========================================================================================
``single``  one worker all micro-batches, in turns
``dp``      worker i micro-batch i, all stages; gradients go from worker to worker as they arise
``mp``      each worker one stage, of which ceil(N (S - k) / S) workers take the micro-batches in turns
=========== =========================================================================================

::

    cdp-v2, N = S = 3, the second worker of dp (A: adds to the sum of the workers before, T: gets the total)
    |F0 T1 U1 F1 T2 U2 F2 B2 A2 B1 A1 B0 A0 T0 U0
    (Letters with stages; T and U are of the batch before.)

A rule's table says which forwards read W[t]. An update comes right before the first of the worker's forwards that does,
or, if none does, after its last backward: so a worker that has one micro-batch needs one version of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from roundelay.ir.action import Action
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
    """

    holder: int
    size: int
    fresh: Table


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
    return Body(1, (*forwards, *(action for _, after in reversed(halves) for action in after)))


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
    is, the update comes after the last backward, and the sharing after the first one.
    """
    first_fresh = one.fresh.index(True) if True in one.fresh else len(one.own)
    shared = [] if one.had else [Action(one.stage, "T", one.end - one.size)]
    updated, summed = Action(one.stage, "U", one.end - one.size), Action(one.stage, "A", one.end)
    passes: list[Halves] = []
    for n, g in enumerate(one.own):
        before, after = [Action(one.stage, "F", g)], [Action(one.stage, "B", g)]
        if n == first_fresh:
            before = [*(shared if n == 0 else ()), updated, *before]
        closing = [summed] if n + 1 == len(one.own) else []
        late = [updated] if closing and first_fresh == len(one.own) else []
        late = [*(shared if n == 0 < first_fresh else ()), *late]
        after += [*late, *closing] if one.had or one.last else [*closing, *late]  # it has room for one total
        passes.append((before, after))
    return passes


def cyclic(layout: str, seat: Seat) -> Schedule:
    """The schedule of a layout, with the loop of one worker.

    Args:
        layout: a key of :data:`LAYOUTS`.
        seat: whose loop it is.
    """
    form = LAYOUTS[layout]
    body = partial(form.body, seat)
    return Schedule(f"cyclic-{layout}", "slots", body, stages_per_worker=form.stages_per_worker, place=form.place)


@dataclass(frozen=True, slots=True)
class Form:
    """One of the four forms.

    Args:
        body: makes a worker's loop.
        place: number of stages -> for each the worker of a replica that runs it.
        stages_per_worker: how many stages a worker runs; 0 for all.
        replicates: whether each micro-batch has a replica of the pipeline.
        deals: whether the holders of a stage take micro-batches in turns.
        sums: whether they hand on sums of gradients.
    """

    body: Callable[[Seat, Sequence[int], int, int], Body]
    place: Callable[[int], tuple[int, ...]] = lambda num_stages: (0,) * num_stages
    stages_per_worker: int = 0
    replicates: bool = False
    deals: bool = False
    sums: bool = False


PIPELINE = "pipeline"
"""The layout of the rules' own schedules."""

LAYOUTS = {
    "single": Form(_single),
    "dp": Form(_replicated, replicates=True, sums=True),
    "mp": Form(_dealt, place=lambda num_stages: tuple(range(num_stages)), stages_per_worker=1, deals=True, sums=True),
}
"""The forms of cyclic data parallelism, by name of the layout."""
