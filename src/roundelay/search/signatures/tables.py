"""A sum of tables over variables that have a number of values each, and its least value, exactly.

Variables are eliminated one after another, that with the smallest table first (bucket elimination; Dechter, 1999). A
table has seconds and bytes. Under a limit on bytes Lagrange's multiplier gives a bound, and branch and bound the rest.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from roundelay.errors import PlanError
from roundelay.ir.num_bytes import bytes_text
from roundelay.search.signatures.boxing_prices import Table

Scope = tuple[int, ...]
"""Variables, by number."""

Choice = tuple[tuple[int, int], ...]
"""Of each variable the value and the variant."""

MOST, AT_ONCE = 1 << 26, 1 << 18
"""Numbers in a table, and those that are added up at a time."""

SECONDS = 20.0
"""For branch and bound."""

LESS = 1 - 1e-12
"""Of a sum, that the order in which it is added does not make."""


class Priced(NamedTuple):
    """A table of seconds, and one of bytes."""

    seconds: Table
    memory: Table

    def at(self, weight: float) -> Table:
        """Seconds, and bytes at a price; of an infinite one bytes alone."""
        if math.isinf(weight):
            return np.where(np.isinf(self.seconds), np.inf, self.memory)
        return self.seconds + weight * self.memory


@dataclass(frozen=True, slots=True)
class Tables:
    """What is minimised.

    Args:
        own: of each variable, by its value and its variant.
        pairs: by two variables, the lower number first.
    """

    own: tuple[Priced, ...]
    pairs: Mapping[Scope, Priced]

    @property
    def space(self) -> int:
        """How many choices there are."""
        return math.prod(int(np.isfinite(table.seconds).sum()) for table in self.own)

    def totals(self, choice: Choice) -> tuple[float, float]:
        """Seconds and bytes of a choice."""
        at = [(table, own) for table, own in zip(self.own, choice, strict=True)]
        at += [(table, (choice[u][0], choice[v][0])) for (u, v), table in self.pairs.items()]
        return float(sum(table.seconds[own] for table, own in at)), float(sum(table.memory[own] for table, own in at))


class Solution(NamedTuple):
    """The best choice, with its seconds, the bytes that it needs, and seconds that no choice undercuts."""

    choice: Choice
    seconds: float
    memory: float
    bound_s: float


class _Elimination:
    """The least value at one price of bytes."""

    def __init__(self, tables: Tables, weight: float) -> None:
        self.own = [table.at(weight) for table in tables.own]
        found: list[tuple[Scope, Table]] = [((i,), own.min(axis=1)) for i, own in enumerate(self.own)]
        found += [(scope, table.at(weight)) for scope, table in tables.pairs.items()]
        self.buckets: list[tuple[int, list[tuple[Scope, Table]]]] = []
        self.known: list[Scope] = []
        remaining, reached = set(range(len(self.own))), set[int]()
        while remaining:
            scopes = {v: {u for scope, _ in found if v in scope for u in scope} for v in remaining}
            variable = min(remaining, key=lambda v: (math.prod(len(self.own[u]) for u in scopes[v]), v))
            bucket = [pair for pair in found if variable in pair[0]]
            rest = tuple(sorted(scopes[variable] - {variable}))
            found = [pair for pair in found if variable not in pair[0]]
            found.append((rest, self._least(variable, bucket, rest)))
            remaining.remove(variable)
            reached |= {*rest}
            self.buckets.append((variable, bucket))
            self.known.append(tuple(sorted(reached & remaining)))  # what matters to this bucket and those before it
        self.least = float(sum(table for _, table in found))

    def _least(self, variable: int, bucket: Sequence[tuple[Scope, Table]], rest: Scope) -> Table:
        """The least over a variable, by the values of the others."""
        sizes = [len(self.own[v]) for v in rest]
        if math.prod(sizes) > MOST:
            raise _too_wide(math.prod(sizes))
        views = sorted([_as(table, own, (*rest, variable)) for own, table in bucket], key=np.size)
        found = np.empty(sizes)
        _into(found, views)
        return found

    def at(self, number: int, values: Mapping[int, int]) -> Table:
        """Of the variable in a bucket, the sum by its values, where those of the others are known."""
        variable, bucket = self.buckets[number]
        views = [table[*[slice(None) if v == variable else values[v] for v in scope]] for scope, table in bucket]
        return reduce(np.add, views)

    def choice(self) -> Choice:
        """The best values and variants."""
        values: dict[int, int] = {}
        for number in range(len(self.buckets) - 1, -1, -1):
            values[self.buckets[number][0]] = int(self.at(number, values).argmin())
        return tuple([(values[v], int(own[values[v]].argmin())) for v, own in enumerate(self.own)])


def _into(found: Table, views: Sequence[Table]) -> None:
    """Put the least over the last axis of the sum of some tables, half by half until it is small."""
    if found.size * max(view.shape[-1] for view in views) <= AT_ONCE or found.size == 1:
        found[...] = reduce(np.add, views).min(axis=-1)
        return
    axis = int(np.argmax(found.shape))
    for half in (slice(None, found.shape[axis] // 2), slice(found.shape[axis] // 2, None)):
        own = (slice(None),) * axis + (half,)
        _into(found[own], [view[own] if view.shape[axis] > 1 else view for view in views])


def _as(table: Table, scope: Scope, wanted: Scope) -> Table:
    """A table with its variables in another order, among more of them."""
    order = sorted(range(len(scope)), key=lambda i: wanted.index(scope[i]))
    shape = [table.shape[scope.index(v)] if v in scope else 1 for v in wanted]
    return np.ascontiguousarray(table.transpose(order)).reshape(shape)


def _too_wide(count: int) -> PlanError:
    return PlanError(
        "the search over signatures",
        got=f"operations that read so many others' results that a table of {count} numbers would be needed",
        expected=f"at most {MOST}",
        remedy="Give a mesh of fewer axes.",
    )


def solve(tables: Tables, limit: float | None = None, seconds: float = SECONDS) -> Solution:
    """The choice of the fewest seconds.

    Args:
        tables: what adds up.
        limit: bytes that a choice may need; None for any number.
        seconds: after which branch and bound ends with a gap.

    Raises:
        PlanError: no choice needs so few bytes, or too many variables hang together.
    """
    free = _Elimination(tables, 0.0)
    fast = _solution(tables, free)
    if limit is None or fast.memory <= limit:
        return fast._replace(bound_s=fast.seconds)
    smallest = _Elimination(tables, math.inf)
    lean = _solution(tables, smallest)
    if lean.memory > limit:
        raise PlanError(
            "the search over signatures",
            got=f"no choice that fits: the smallest holds {bytes_text(math.ceil(lean.memory))} on a worker",
            expected=f"at most {bytes_text(int(limit))}",
            remedy=f"Smallest fix: {bytes_text(math.ceil(lean.memory - limit))} more on each worker.",
        )
    weight, tied, lean = _multiplier(tables, limit, fast, lean)
    return _Branches(tables, [(tied, weight), (free, 0.0)], smallest, limit, time.monotonic() + seconds).best(lean)


def least_memory(tables: Tables) -> float:
    """Bytes that every choice needs."""
    return _Elimination(tables, math.inf).least


def _solution(tables: Tables, found: _Elimination) -> Solution:
    return Solution(found.choice(), *tables.totals(found.choice()), 0.0)


def _multiplier(tables: Tables, limit: float, fast: Solution, lean: Solution) -> tuple[float, _Elimination, Solution]:
    """The price of bytes at which a fast and a lean choice tie, by secants; the best choice on the way that fits."""
    while True:
        weight = (lean.seconds - fast.seconds) / (fast.memory - lean.memory)
        found = _Elimination(tables, weight)
        own = _solution(tables, found)
        if own.seconds + weight * own.memory >= LESS * (lean.seconds + weight * lean.memory):
            return weight, found, lean
        fast, lean = (fast, own) if own.memory <= limit else (own, lean)


class _Branches:
    """Branch and bound, depth first, in the reverse order of elimination.

    Of two partial choices that leave the same to choose from, one with more seconds and more bytes is dropped.

    Each elimination at a price of bytes gives a bound, the last of them without a price; that of bytes alone says what
    fits.
    """

    def __init__(
        self,
        tables: Tables,
        weighted: Sequence[tuple[_Elimination, float]],
        lean: _Elimination,
        limit: float,
        end: float,
    ) -> None:
        self._tables, self._limit, self._end, self._cut = tables, limit, end, False
        self._all = [*[one for one, _ in weighted], lean]
        self._bases = [*[one.least - weight * limit for one, weight in weighted], lean.least]
        self._variants = [[_above_least(own) for own in one.own] for one in self._all]
        self._fronts: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)

    def best(self, found: Solution) -> Solution:
        """The best choice that fits, from one that does; the bound is its own seconds where all others are refuted."""
        self._best = found
        self._go(len(self._all[0].buckets) - 1, {}, self._bases)
        return self._best._replace(bound_s=self._bases[0] if self._cut else self._best.seconds)

    def _go(self, number: int, chosen: Mapping[int, tuple[int, int]], spent: Sequence[float]) -> None:
        if number < 0:
            choice = tuple([chosen[v] for v in range(len(chosen))])
            seconds, memory = self._tables.totals(choice)
            if memory <= self._limit and seconds < self._best.seconds:
                self._best = Solution(choice, seconds, memory, 0.0)
            return
        values = {v: value for v, (value, _) in chosen.items()}
        front = self._fronts[number, *[values[v] for v in self._all[0].known[number]]]
        if any(seconds <= spent[-2] and memory <= spent[-1] for seconds, memory in front):
            return
        front.append((spent[-2], spent[-1]))
        variable = self._all[0].buckets[number][0]
        sums = [one.at(number, values) for one in self._all]
        bounds = [
            base + (own - own.min())[:, None] + extra[variable]
            for base, own, extra in zip(spent, sums, self._variants, strict=True)
        ]
        seconds = np.maximum.reduce(bounds[:-1])
        fits = (seconds < LESS * self._best.seconds) & (LESS * bounds[-1] <= self._limit)
        for value, variant in sorted(np.argwhere(fits).tolist(), key=lambda at: (float(seconds[*at]), at)):
            self._cut = self._cut or time.monotonic() > self._end
            if self._cut or seconds[value, variant] >= LESS * self._best.seconds:
                return
            own = [float(bound[value, variant]) for bound in bounds]
            self._go(number - 1, {**chosen, variable: (value, variant)}, own)


def _above_least(own: Table) -> Table:
    """By value and variant, how much more than the value's best variant."""
    least = own.min(axis=1, keepdims=True)
    return np.where(np.isfinite(own), own - np.where(np.isfinite(least), least, 0.0), np.inf)
