"""The search where workers with equal links are interchangeable: what counts is how many bits of their number do what.

A mesh of powers of two is one of axes of two, *bits*, by class of link. A way gives each letter so many bits of each
class; which ones, and in which order they split a dimension, is left open. Axes such as ``node[0:3]`` stand for three
bits of the class ``node``. Any way over labelled axes has one here that costs no more, so the least is a bound.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product

from roundelay.ir.layout import Lay
from roundelay.ir.sbp import Signature
from roundelay.search.signatures.bit_prices import BitPrices
from roundelay.search.signatures.boxing_prices import Link
from roundelay.search.signatures.local_forms import LocalOp
from roundelay.search.signatures.ways import Letter, State, Way, state

MOST_STATES = 500
"""Of a tensor of three dimensions over all bits, with six pairs of signatures: beyond, it lies divided among all."""


class Bits:
    """The space of a mesh of classes of interchangeable bits.

    Args:
        classes: bits of each class, by name.
        full: no worker computes what another one does, where operations can be divided so far, and between operations
            tensors are divided among all workers.
    """

    def __init__(self, classes: Mapping[str, int], *, full: bool) -> None:
        self.classes, self.full = classes, full
        self.axes = {
            f"{name}[{start}:{end}]": (name, end - start)
            for name, count in classes.items()
            for start in range(count)
            for end in range(start + 1, count + 1)
        }
        self._numbers = {name: i for i, name in enumerate(classes)}
        self.mesh = {axis: 1 << bits for axis, (_, bits) in self.axes.items()}

    def ways(self, op: LocalOp, found: Sequence[Letter]) -> list[Way]:
        """All ways of an operation, by its letters."""
        divided = [letter for letter in found if letter.label is not None]
        every = [self._way(found, counts) for counts in self._counts(op, divided)] if self.full else []
        every = every or [self._way(found, counts) for counts in self._counts(op, list(found))]
        most = max(way.parts for way in every)
        return [way for way in every if way.parts == most] if self.full else every

    def _counts(self, op: LocalOp, found: Sequence[Letter]) -> Iterator[dict[Letter, tuple[int, ...]]]:
        """By letter the bits of each class, in all ways."""
        sizes = {label: size for _, dims in op.ports for factors in dims for label, size in factors}
        most = [_bits_in(sizes[letter.label]) if letter.label is not None else math.inf for letter in found]
        every = [[own for own in _compositions(bits, len(found)) if _fits(own, most)] for bits in self.classes.values()]
        inner = _inner(op) if self.full else {}
        for each in product(*every):
            totals = [sum(own) for own in zip(*each, strict=True)]
            parts = {letter.label: bits for letter, bits in zip(found, totals, strict=True)}
            if _fits(totals, most) and all(
                not parts.get(label) or all(parts.get(own, 0) == bits for own, bits in around)
                for label, around in inner.items()
            ):
                yield dict(zip(found, zip(*each, strict=True), strict=True))

    def _way(self, found: Sequence[Letter], counts: Mapping[Letter, tuple[int, ...]]) -> Way:
        own: dict[str, Letter] = {}
        order: dict[int, tuple[str, ...]] = {}
        starts = dict.fromkeys(self.classes, 0)
        for letter, bits in counts.items():
            axes = _named(bits, starts)
            own |= dict.fromkeys(axes, letter)
            if letter.label is not None and axes:
                order[letter.label] = axes
        parts = 1 << sum(sum(bits) for letter, bits in counts.items() if letter.label is not None)
        return Way(own, order, parts)

    def state(self, op: LocalOp, way: Way, port: int) -> State:
        """How a tensor of an operation lies, by its number among those that it reads and produces."""
        found = state(op, way, port, self.mesh)
        value = self._canonical(found.value)
        return State(value, value if found.gradient == found.value else self._canonical(found.gradient))

    def _canonical(self, lay: Lay) -> Lay:
        counts: dict[Signature, list[int]] = {}
        for axis, own in lay:
            name, bits = self.axes[axis]
            of_class = counts.setdefault(own, [0] * len(self.classes))
            of_class[self._numbers[name]] += bits
        starts = dict.fromkeys(self.classes, 0)
        return tuple([(axis, own) for own, bits in counts.items() for axis in _named(bits, starts)])

    def key(self, op: LocalOp) -> Hashable:
        """What operations must have in common to be computed alike, beside their form."""
        return ()

    def prices(self, lays: Iterable[Lay], links: Mapping[str, Link], num_bytes: float) -> BitPrices:
        """Of boxings of a tensor of so many bytes."""
        return BitPrices(self.axes, tuple(self.classes.items()), links, num_bytes)


def _bits_in(size: int) -> int:
    """How often a size can be halved."""
    return (size & -size).bit_length() - 1


def _fits(bits: Sequence[int], most: Sequence[float]) -> bool:
    return all(map(operator.le, bits, most))


def _compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 0:
        yield from [()] * (total == 0)
    elif count == 1:
        yield (total,)
    else:
        for first in range(total, -1, -1):
            for rest in _compositions(total - first, count - 1):
                yield (first, *rest)


def _named(bits: Sequence[int], starts: dict[str, int]) -> tuple[str, ...]:
    """Names of the next so many bits of each class."""
    found = []
    for (name, start), count in zip([*starts.items()], bits, strict=True):
        if count:
            found.append(f"{name}[{start}:{start + count}]")
            starts[name] = start + count
    return tuple(found)


def _inner(op: LocalOp) -> dict[int, list[tuple[int, int]]]:
    """By label those around it in a dimension, with how many bits can split these."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for _, dims in op.ports:
        for factors in dims:
            for i, (label, _) in enumerate(factors):
                if label is not None:
                    found[label] += [(own, _bits_in(size)) for own, size in factors[:i] if own is not None]
    return found


def bits_of(mesh: Mapping[str, int], links: Mapping[str, Link]) -> tuple[Bits, dict[str, Link]]:
    """The bits of a mesh of powers of two, and the links of their classes, each named by its axes.

    Nothing is left out while a tensor of three dimensions lies in few ways.
    """
    names: dict[Link, list[str]] = defaultdict(list)
    for axis in mesh:
        names[links[axis]].append(axis)
    classes = {"+".join(own): sum(mesh[axis].bit_length() - 1 for axis in own) for own in names.values()}
    states = math.prod(math.comb(count + 5, 5) for count in classes.values())
    return Bits(classes, full=states > MOST_STATES), {"+".join(own): link for link, own in names.items()}
