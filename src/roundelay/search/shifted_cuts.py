"""The best plans of a search, cut a little earlier or later, by the simulator. No torch is needed.

Cuts are chosen for the fastest slowest stage (:mod:`roundelay.planner.partition_dp`), which counts neither filling and
draining nor what stages exchange. So every cut of the best pipelines is moved, by one place where the model may be cut,
by two, by four and so on, as long as a batch takes less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from roundelay.errors import RoundelayError
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.plan_options import Choices
from roundelay.search.search import KEPT, Found, Task, Tell, Tried, tried
from roundelay.search.space import family

SHIFTED = 4
"""How many of the best pipelines are cut elsewhere."""

MOST = 48
"""Plans that are simulated for each of them, at most."""

NEAR = 1.15
"""Times as long as the best's batch a batch may take: moved cuts would not make up for more."""

LESS = 1 - 1e-3
"""Of a batch's seconds, that are worth another cut."""


def with_shifted_cuts(task: Task, found: Found, tell: Tell = lambda *_: None) -> Found:
    """What a search found, with better cuts where there are some.

    Args:
        task: of the search.
        found: by it.
        tell: called before each plan.
    """
    near_s = NEAR * found.best[0].cost_s
    pipelines = [one for one in (*found.best, *found.families.values()) if one.cost_s < near_s and _cuts(one)]
    better = {}
    for one in pipelines[:SHIFTED]:
        tell(found.simulated, found.points, found.best[0])
        better[one.choices] = _shifted(task, one)
    known = dict.fromkeys([one.choices for one in found.best]) | better
    own = {one.choices: one for one in found.best}
    every = sorted([better.get(choices) or own[choices] for choices in known], key=lambda one: one.cost_s)
    families = {name: better.get(one.choices, one) for name, one in found.families.items()}
    families |= {family(one.choices): one for one in reversed(every)}
    fastest = dict(sorted(families.items(), key=lambda pair: pair[1].cost_s))
    return replace(found, best=tuple(every[:KEPT]), families=fastest)


def _cuts(one: Tried) -> tuple[str, ...]:
    """The operations that end its stages but for the last; none where they are given, or a boxing stands there."""
    known = inherited(one.priced.plan, Choices()).cuts
    if one.choices.cuts is not None or known is None or isinstance(known, str):
        return ()
    return tuple([ends[-1] for ends in known[:-1]])


def _shifted(task: Task, one: Tried) -> Tried:
    legal = [task.facts.graph.ops[i].name for i in task.facts.graph.cuts]
    places = [legal.index(name) for name in _cuts(one)]
    if (cluster := task.machine.cluster) is not None:  # given cuts leave workers in its order
        task = replace(task, machine=replace(task.machine, cluster=cluster.as_in(one.priced.plan)))
    best, left = one, MOST
    while (found := _first_better(task, best, places, legal, left)) is not None:
        best, places, left = found
    return best


def _first_better(
    task: Task, best: Tried, places: Sequence[int], legal: Sequence[str], left: int
) -> tuple[Tried, list[int], int] | None:
    """The first plan that takes less, where it is cut, and how many more may be simulated; None if there is none."""
    for moved in _moves(places, len(legal)):
        if not left:
            return None
        left -= 1
        choices = replace(best.choices, cuts=",".join(legal[i] for i in moved))
        try:
            own = tried(task, choices)
        except RoundelayError:
            continue
        if not own.lacking and own.cost_s < LESS * best.cost_s:
            return own, moved, left
    return None


def _moves(places: Sequence[int], count: int) -> Iterator[list[int]]:
    """All ways to move one cut, the longest moves first."""
    for power in reversed(range(count.bit_length())):
        for k, place in enumerate(places):
            for step in (1 << power, -(1 << power)):
                moved = [*places[:k], place + step, *places[k + 1 :]]
                if 0 <= moved[k] < count and moved == sorted(set(moved)):
                    yield moved
