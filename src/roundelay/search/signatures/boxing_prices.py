"""Seconds of every boxing of a tensor: shortest ways over the steps between its lays (Bellman, Ford).

The steps are those of :func:`roundelay.lower.boxing.moves`; the way that is priced is the one that is told. What has
become partial stays so: summing zeros that were put there is no boxing.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from roundelay.ir.layout import Lay
from roundelay.ir.sbp import P, Split
from roundelay.lower.boxing import Sizes, Step, moves
from roundelay.search.signatures.ways import State

Table = npt.NDArray[np.float64]

Words = frozenset[tuple[int | None, Lay]]
"""The splits of each dimension, in order, and those that lead to them; with None what is partial."""

_Place = tuple[Lay, frozenset[str]]
"""A lay, and the axes over which it has become partial."""


class Link(NamedTuple):
    """Between the workers along an axis: seconds of a phase of an exchange, and bytes that a worker sends in one."""

    latency_s: float
    bytes_per_s: float


def scatter_share(axes: Sequence[tuple[int, Link]]) -> float:
    """Seconds for each byte of a worker's tensor of a reduce-scatter along axes of these sizes, in the best order."""

    def in_order(order: Sequence[tuple[int, Link]]) -> float:
        sizes = [1, *itertools.accumulate((size for size, _ in order), operator.mul)]
        parts = zip(order, sizes, strict=False)
        return math.fsum((size - 1) / size / before / link.bytes_per_s for (size, link), before in parts)

    return min(map(in_order, itertools.permutations(axes)))


def share(lay: Lay, mesh: Mapping[str, int]) -> float:
    """The part of a tensor that a worker has."""
    return 1.0 / math.prod(mesh[axis] for axis, own in lay if isinstance(own, Split))


def _by_dim(lay: Lay) -> dict[int | None, Lay]:
    found: dict[int | None, Lay] = {None: ()}
    for pair in lay:
        dim = pair[1].dim if isinstance(pair[1], Split) else None
        found[dim] = (*found.get(dim, ()), pair)
    return found


def _words(lays: Iterable[Lay]) -> Words:
    return frozenset((dim, own[:i]) for lay in lays for dim, own in _by_dim(lay).items() for i in range(len(own) + 1))


@cache
def _steps(words: Words, sizes: Sizes) -> dict[_Place, list[tuple[_Place, Step, float]]]:
    """To each place from which, by what step, and the share of the tensor that a worker sends in it."""

    def choice(axis: str, rest: Lay) -> tuple[list[Split], bool]:
        own = _by_dim(rest)
        ends = [lay[-1][1] for dim, lay in words if lay and lay == (*own.get(dim, ()), (axis, lay[-1][1]))]
        return sorted([end for end in ends if isinstance(end, Split)], key=str), True

    waiting: list[_Place] = [(lay, frozenset()) for dim, lay in words if dim is None]
    found: dict[_Place, list[tuple[_Place, Step, float]]] = {place: [] for place in sorted(waiting, key=str)}
    while waiting:
        own, made = waiting.pop()
        for step, lay, sent in moves(own, dict(sizes), choice):
            if step.axis not in made:
                after = lay, made | {step.axis} if step.target == P else made
                if after not in found:
                    found[after] = []
                    waiting.append(after)
                found[after].append(((own, made), step, float(sent)))
    return found


class BoxingPrices:
    """Prices of the boxings of tensors of one size.

    Args:
        lays: between which.
        mesh: sizes of the axes.
        links: along the axes.
        num_bytes: of a whole tensor.
    """

    def __init__(
        self, lays: Iterable[Lay], mesh: Mapping[str, int], links: Mapping[str, Link], num_bytes: float
    ) -> None:
        every = sorted(lays, key=str)
        steps = _steps(_words(every), tuple(mesh.items()))
        numbers = {place: i for i, place in enumerate(steps)}
        self._columns = {lay: i for i, lay in enumerate(every)}
        self._starts = {lay: numbers[lay, frozenset()] for lay in every}
        self._ends: dict[Lay, list[int]] = defaultdict(list)
        for (lay, _), number in numbers.items():
            self._ends[lay].append(number)

        def price_s(step: Step, sent: float) -> float:
            link = links[step.axis]
            return len(step.phases) * link.latency_s + sent * num_bytes / link.bytes_per_s

        self._steps = [
            [(price_s(step, sent), numbers[own], step) for own, step, sent in into] for into in steps.values()
        ]
        self._seconds = self._closed()

    def _closed(self) -> Table:
        """Seconds to each place from each lay, by the steps into a place until nothing gets less."""
        most = max(map(len, self._steps))
        padded = [[*into, *[(math.inf, 0, None)] * (most - len(into))] for into in self._steps]
        sources = np.array([[source for _, source, _ in into] for into in padded], dtype=int)
        prices = np.array([[price for price, _, _ in into] for into in padded])
        seconds = np.full((len(padded), len(self._starts)), np.inf)
        seconds[[*self._starts.values()], range(len(self._starts))] = 0.0
        before = np.zeros_like(seconds)
        while not np.array_equal(before, seconds):
            before = seconds
            for i in range(most):
                seconds = np.minimum(seconds, before[sources[:, i]] + prices[:, i, None])
        return seconds

    def seconds(self, sources: Sequence[Lay], targets: Sequence[Lay]) -> Table:
        """From each source to each target."""
        into = np.array([self._seconds[self._ends[lay]].min(axis=0) for lay in targets])
        return into[:, [self._columns[lay] for lay in sources]].T

    def of_states(self, sources: Sequence[State], targets: Sequence[State]) -> Table:
        """Forward from source to target, and backward from the target's gradient to the source's."""
        forward = self.seconds([one.value for one in sources], [one.value for one in targets])
        return forward + self.seconds([one.gradient for one in targets], [one.gradient for one in sources]).T

    def way(self, source: Lay, target: Lay) -> tuple[Step, ...]:
        """The steps that are priced."""
        spent, found = self._seconds[:, self._columns[source]], list[Step]()
        own = min(self._ends[target], key=lambda end: float(spent[end]))
        while own != self._starts[source]:
            _, own, step = min(self._steps[own], key=lambda one: (float(spent[one[1]]) + one[0], one[1]))
            found.append(step)
        return tuple(reversed(found))
