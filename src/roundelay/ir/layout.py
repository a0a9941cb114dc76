"""How a tensor lies on a mesh of several axes: which of its numbers each holder has.

A *lay* names axes with their signatures; an axis that is not named is ``B``. It is read from left to right: a split
reads what the splits before it have left of its dimension, so that ``(a: S(0), b: S(0))`` gives each of a's parts to
b's holders, and differs from ``(b: S(0), a: S(0))``. Parts may be uneven: bounds are balanced within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundelay.ir.mesh import Mesh
from roundelay.ir.sbp import B, Partial, Signature, Split

Lay = tuple[tuple[str, Signature], ...]
"""(axis, signature), in the order in which splits are applied."""

FLAT = -1
"""The dimension of a split of all that a holder has, read as one row of numbers: between two steps of a route."""

Ranges = tuple[tuple[int, int], ...]
"""Of one dimension: where the numbers that a holder has begin and end."""


def canonical(lay: Lay) -> Lay:
    """The lay that says the same: splits by dimension, flat ones last, then partial axes by name, and no ``B``."""
    splits = [(axis, own) for axis, own in lay if isinstance(own, Split)]
    partial = sorted((axis, own) for axis, own in lay if isinstance(own, Partial))
    return (*sorted(splits, key=lambda pair: math.inf if pair[1].dim == FLAT else pair[1].dim), *partial)


def signature_on(lay: Lay, axis: str) -> Signature:
    """The signature on an axis."""
    return dict(lay).get(axis, B)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor on a mesh.

    Args:
        shape: of the whole.
        mesh: the holders.
        lay: how it lies on them.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    lay: Lay

    def local_shape(self, holder: int) -> tuple[int, ...]:
        """The shape of what a holder has; of one dimension where it is read as one row."""
        return local_shape_at(self.shape, self.lay, self.mesh.sizes, self.mesh.coordinates(holder))

    def pieces(self, holder: int) -> tuple[Ranges, ...]:
        """For each dimension where in the whole the numbers lie that a holder has, or to which it adds."""
        at = self.mesh.coordinates(holder)
        found: list[Ranges] = [((0, size),) for size in self.shape]
        for axis, own in self.lay:
            if isinstance(own, Split):
                found[own.dim] = _within(found[own.dim], own, self.mesh.sizes[axis], at[axis])
        return tuple(found)


def local_shape_at(shape: Sequence[int], lay: Lay, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of what the holder at these coordinates has of a tensor of this shape."""
    own = list(shape)
    for axis, signature in lay:
        if isinstance(signature, Split) and signature.dim == FLAT:
            own = [Split(0).local_size(math.prod(own), sizes[axis], at[axis])]
        elif isinstance(signature, Split):
            own[signature.dim] = signature.local_size(own[signature.dim], sizes[axis], at[axis])
    return tuple(own)


def _within(ranges: Ranges, split: Split, parts: int, part: int) -> Ranges:
    """What a part of a dimension of which only these ranges are left has of them."""
    size = sum(end - start for start, end in ranges)
    found: list[tuple[int, int]] = []
    for wanted, stop in split.ranges(size, parts, part):
        at = 0
        for start, end in ranges:
            first, last = max(wanted, at), min(stop, at + end - start)
            if first < last:
                found.append((start + first - at, start + last - at))
            at += end - start
    joined: list[tuple[int, int]] = []
    for start, end in found:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return tuple(joined)
