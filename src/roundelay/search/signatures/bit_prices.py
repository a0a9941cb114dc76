"""Seconds of boxings where what counts is how many bits of the workers' number split what (Bellman, Ford).

A step moves some bits of one class of links from one signature to another, as one axis of so many workers, priced by
:func:`roundelay.lower.boxing.moves`. Partial bits of several classes become broadcast together: reduced and scattered
along one class after another, and gathered back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from roundelay.ir.layout import Lay
from roundelay.ir.sbp import B, P, Partial, Signature, Split
from roundelay.lower.boxing import moves
from roundelay.search.signatures.boxing_prices import Link, Table, scatter_share, share
from roundelay.search.signatures.ways import State

Class = tuple[str, int]
"""A class of links and a number of bits."""

Counts = npt.NDArray[np.int64]

Links = tuple[tuple[str, int, Link], ...]
"""By class its name, its bits and its link."""

Word = tuple[tuple[int, ...], ...]
"""Of one dimension, by its signatures in order, the bits of each class."""


class _Move(NamedTuple):
    """From which places to which, with seconds and seconds for each byte of a tensor."""

    sources: npt.NDArray[np.intp]
    targets: npt.NDArray[np.intp]
    latency_s: float
    s_per_byte: Table


class _Kind(NamedTuple):
    """Bits of each class that move from a signature, by number, to another; seconds, and those for each byte held."""

    source: int | None
    target: int | None
    bits: Counts
    latency_s: float
    s_per_byte: float


class _Places(NamedTuple):
    """Ways in which a tensor lies: the signatures, the bits of each class that each has, and the moves between them."""

    numbers: Mapping[bytes, int]
    moves: Sequence[_Move]


class BitPrices:
    """Prices of the boxings of tensors of one size.

    Args:
        axes: by name of some bits their class, and how many they are.
        classes: bits of each class.
        links: by the name of some bits.
        num_bytes: of a whole tensor.
    """

    def __init__(
        self, axes: Mapping[str, Class], classes: tuple[Class, ...], links: Mapping[str, Link], num_bytes: float
    ) -> None:
        self._axes, self._num_bytes = axes, num_bytes
        self._made: dict[tuple[tuple[Lay, ...], ...], Table] = {}
        self._names = {name: i for i, (name, _) in enumerate(classes)}
        self._links: Links = tuple([(name, bits, links[f"{name}[0:1]"]) for name, bits in classes])

    def seconds(self, sources: Sequence[Lay], targets: Sequence[Lay]) -> Table:
        """From each source to each target."""
        rows, columns = ({lay: i for i, lay in enumerate(sorted({*lays}, key=str))} for lays in (sources, targets))
        key = tuple(rows), tuple(columns)
        if key not in self._made:
            self._made[key] = self._between(*key)
        return self._made[key][np.ix_([rows[lay] for lay in sources], [columns[lay] for lay in targets])]

    def _between(self, sources: Sequence[Lay], targets: Sequence[Lay]) -> Table:
        signatures = sorted({own for lay in (*sources, *targets) for _, own in lay}, key=_in_order)
        counts = [np.array([self._counts(lay, signatures) for lay in lays]) for lays in (sources, targets)]
        dims = [_dim(own) for own in signatures]
        words = [_words(counts, [i for i, own in enumerate(dims) if own == dim]) for dim in dict.fromkeys(dims)]
        places = _places(tuple(signatures), tuple(words), self._links, self._may_idle(signatures, counts))
        numbers = [[places.numbers[own.tobytes()] for own in each] for each in counts]
        if len(sources) > len(targets):  # from the side on which there are fewer
            return self._closed(places, *reversed(numbers), back=True).T
        return self._closed(places, *numbers, back=False)

    def _may_idle(self, signatures: Sequence[Signature], counts: Sequence[Counts]) -> bool:
        """Whether something lies partial over some bits and broadcast over others; else nothing on the way does."""
        most = np.array([bits for _, bits, _ in self._links])
        partial = [isinstance(own, Partial) for own in signatures]
        return any(
            bool(((each.sum(axis=1) < most).any(axis=1) & each[:, partial].any(axis=(1, 2))).any()) for each in counts
        )

    def _counts(self, lay: Lay, signatures: Sequence[Signature]) -> Counts:
        found = np.zeros((len(signatures), len(self._names)), dtype=np.int64)
        for axis, own in lay:
            name, bits = self._axes[axis]
            found[signatures.index(own), self._names[name]] += bits
        return found

    def _closed(self, places: _Places, starts: Sequence[int], ends: Sequence[int], *, back: bool) -> Table:
        """Seconds from starts to ends, or back: by the moves from what has become less, until nothing does."""
        seconds = np.full((len(places.numbers), len(starts)), np.inf)
        seconds[starts, range(len(starts))] = 0.0
        priced = [
            (*((to, own) if back else (own, to)), (latency_s + self._num_bytes * s_per_byte)[:, None])
            for own, to, latency_s, s_per_byte in places.moves
        ]
        less = np.zeros(len(seconds), dtype=bool)
        less[starts] = True
        while less.any():
            before, less = less, np.zeros_like(less)
            for own, to, price in priced:
                at = np.flatnonzero(before[own] | less[own])
                found = seconds[own[at]] + price[at]
                better = (found < seconds[to[at]]).any(axis=1)
                reached = to[at[better]]
                seconds[reached] = np.minimum(seconds[reached], found[better])
                less[reached] = True
        return seconds[ends].T

    def _dual(self, lay: Lay) -> Lay:
        """What is partial broadcast, and the other way round: a boxing takes as long as that of the duals back."""
        splits = tuple([pair for pair in lay if isinstance(pair[1], Split)])
        split, known = ([self._axes[axis] for axis, _ in pairs] for pairs in (splits, lay))
        found = [*splits]
        for name, most, _ in self._links:
            start, rest = (sum(bits for own, bits in bits_of if own == name) for bits_of in (split, known))
            if rest < most:
                found.append((f"{name}[{start}:{start + most - rest}]", P))
        return tuple(found)

    def of_states(self, sources: Sequence[State], targets: Sequence[State]) -> Table:
        """Forward from source to target, and backward from the target's gradient to the source's."""
        forward = self.seconds([one.value for one in sources], [one.value for one in targets])
        duals = {lay: self._dual(lay) for lay in {one.gradient for one in (*sources, *targets)}}
        return forward + self.seconds(
            [duals[one.gradient] for one in sources], [duals[one.gradient] for one in targets]
        )


def _dim(own: Signature) -> int | None:
    return own.dim if isinstance(own, Split) else None


def _in_order(own: Signature) -> tuple[float, int, str]:
    return (own.dim, own.outer, str(own)) if isinstance(own, Split) else (math.inf, 0, str(own))


def _words(counts: Sequence[Counts], columns: Sequence[int]) -> tuple[Word, ...]:
    """The splits of a dimension, and those that lead to them."""
    waiting = [tuple(map(tuple, own)) for each in counts for own in np.unique(each[:, columns], axis=0).tolist()]
    found = set(waiting)
    while waiting:
        own = waiting.pop()
        last = max([i for i, bits in enumerate(own) if any(bits)], default=0)
        for k in range(len(own[last])):
            if own[last][k]:
                fewer = tuple([n - (i == k) for i, n in enumerate(own[last])])
                if (after := (*own[:last], fewer, *own[last + 1 :])) not in found:
                    found.add(after)
                    waiting.append(after)
    return tuple(sorted(found))


@cache
def _places(
    signatures: tuple[Signature, ...], words: tuple[tuple[Word, ...], ...], links: Links, idle: bool
) -> _Places:
    bits = np.array([count for _, count, _ in links])
    counts = np.zeros((1, 0, len(links)), dtype=np.int64)
    for each in words:
        own = np.array(each, dtype=np.int64)
        counts = np.concatenate([np.repeat(counts, len(own), axis=0), np.tile(own, (len(counts), 1, 1))], axis=1)
        counts = counts[(counts.sum(axis=1) <= bits).all(axis=1)]
    if not idle:
        partial = counts[:, [isinstance(own, Partial) for own in signatures]].any(axis=(1, 2))
        counts = counts[~partial | (counts.sum(axis=1) == bits).all(axis=1)]
    rest = bits - counts.sum(axis=1)
    held = 0.5 ** counts[:, [isinstance(own, Split) for own in signatures]].sum(axis=(1, 2))
    numbers = {own.tobytes(): i for i, own in enumerate(counts)}
    found = []
    radix = np.cumprod([1, *(np.max(counts, axis=0, initial=0).ravel() + 1)])[:-1].reshape(counts.shape[1:])
    keys = (counts * radix).sum(axis=(1, 2))
    ordered = np.argsort(keys)
    later = [
        np.array([_dim(one) == _dim(own) and isinstance(own, Split) and j > i for j, one in enumerate(signatures)])
        for i, own in enumerate(signatures)
    ]
    for source, target, taken, latency_s, s_each in _kinds(signatures, links):
        has = rest if source is None else counts[:, source]
        fits = (has >= taken).all(axis=1)
        for end in (source, target):
            if end is not None and later[end].any():
                fits &= counts[:, later[end]].sum(axis=(1, 2)) == 0
        from_places = np.flatnonzero(fits)
        wanted = keys[from_places]
        wanted = wanted - ((radix[source] * taken).sum() if source is not None else 0)
        if target is not None:
            small = (counts[from_places, target] + taken <= counts[:, target].max(axis=0)).all(axis=1)
            from_places, wanted = from_places[small], wanted[small] + (radix[target] * taken).sum()
        at = np.searchsorted(keys[ordered], wanted).clip(max=len(keys) - 1)
        known = keys[ordered][at] == wanted
        if known.any():
            own_places = from_places[known]
            found.append(_Move(own_places, ordered[at[known]], latency_s, s_each * held[own_places]))
    return _Places(numbers, found)


def _kinds(signatures: Sequence[Signature], links: Links) -> list[_Kind]:
    """All steps: first those between splits, then those along slow links, as ways begin so that send little."""
    number: dict[Signature, int | None] = {own: i for i, own in enumerate(signatures)} | {B: None}
    splits = [own for own in signatures if isinstance(own, Split)]
    among: list[_Kind] = []
    others: list[_Kind] = []
    for c, (name, most, link) in sorted(enumerate(links), key=lambda one: one[1][2].bytes_per_s):
        for bits, source in product(range(1, most + 1), number):
            taken = np.array([bits * (i == c) for i in range(len(links))])
            lay: Lay = () if source == B else ((name, source),)
            mesh = {name: 1 << bits}
            for step, _, sent in moves(lay, mesh, lambda *_: (splits, P in number)):
                if step.target in number:
                    s_per_byte = float(sent) / share(lay, mesh) / link.bytes_per_s
                    into = among if {step.source, step.target} <= {*splits} else others
                    latency_s = len(step.phases) * link.latency_s
                    into.append(_Kind(number[source], number[step.target], taken, latency_s, s_per_byte))
    for partial in [own for own in signatures if isinstance(own, Partial)]:
        for each in product(*[range(most + 1) for _, most, _ in links]):
            if len(axes := [(1 << bits, link) for bits, (_, _, link) in zip(each, links, strict=True) if bits]) > 1:
                latency_s = 2 * sum(link.latency_s for _, link in axes)
                others.append(_Kind(number[partial], None, np.array(each), latency_s, 2 * scatter_share(axes)))
    return [*among, *others]
