"""From numbers of bits to axes: the best plan over labelled axes in which every operation has the bits that were found.

The axes are the fewest of which each operation's bits can be made. Which of them it takes, and in which order, is
searched exactly, so the seconds are those of a plan; by what they exceed the bound is the gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from roundelay.search.signatures.local_forms import LocalOp
from roundelay.search.signatures.problem import Problem
from roundelay.search.signatures.quotient import Bits
from roundelay.search.signatures.spaces import Axes
from roundelay.search.signatures.tables import Solution
from roundelay.search.signatures.ways import Letter, Way, ways

Bound = Mapping[Letter, Mapping[str, int]]
"""By letter the bits of each class."""


class Lifted(Axes):
    """Ways over labelled axes in which operations have so many bits.

    Args:
        bits: the space in which they were found.
        found: by operation.
    """

    def __init__(self, bits: Bits, found: Mapping[str, Bound]) -> None:
        self._found, self.axes = found, dict[str, tuple[str, int]]()
        for name, count in bits.classes.items():
            wanted = {tuple([own.get(name, 0) for own in one.values()]) for one in found.values()}
            parts = next(own for own in _partitions(count, count) if all(_made_of(own, each) for each in wanted))
            self.axes |= {f"{name}.{i}" if len(parts) > 1 else name: (name, part) for i, part in enumerate(parts)}
        super().__init__({axis: 1 << count for axis, (_, count) in self.axes.items()})

    def ways(self, op: LocalOp, found: Sequence[Letter]) -> list[Way]:
        """All ways of an operation, by its letters, that have the bits that were found."""
        if (own := self._found.get(op.name)) is None:
            return super().ways(op, found)

        def may(letter: Letter, axes: Sequence[str]) -> bool:
            taken = Counter[str]()
            for axis in axes:
                taken[self.axes[axis][0]] += self.axes[axis][1]
            return all(count <= own.get(letter, {}).get(name, 0) for name, count in taken.items())

        return ways(op, found, self.mesh, may)

    def key(self, op: LocalOp) -> frozenset[tuple[Letter, tuple[tuple[str, int], ...]]]:
        """What operations must have in common to be computed alike, beside their form."""
        found = self._found.get(op.name, {})
        return frozenset((letter, tuple(own.items())) for letter, own in found.items())


def lifted(bits: Bits, made: Problem, solution: Solution) -> Lifted:
    """The space over labelled axes of what was found over bits."""
    found: dict[str, Bound] = {}
    for variable, (value, _) in zip(made.variables, solution.choice, strict=True):
        for cluster in variable.clusters:
            for op, way in zip(cluster.ops, cluster.ways[value], strict=True):
                own: dict[Letter, Counter[str]] = {}
                for axis, letter in way.letters.items():
                    name, count = bits.axes[axis]
                    own.setdefault(letter, Counter())[name] += count
                found[op.name] = own
    return Lifted(bits, found)


def _partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum, the fewest parts first."""
    yield from sorted(_sums(total, most), key=len)


def _sums(total: int, most: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        yield from [(first, *rest) for rest in _sums(total - first, first)]


def _made_of(parts: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether parts can be dealt out to sums."""
    if not parts:
        return not any(wanted)
    return any(
        _made_of(parts[1:], (*wanted[:i], own - parts[0], *wanted[i + 1 :]))
        for i, own in enumerate(wanted)
        if own >= parts[0]
    )
