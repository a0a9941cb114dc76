"""Meshes: which of a stage's holders is which, by axes.

The first axes are *dealt*: along them holders have micro-batches of their own, as replicas do. Along the others they
have parts of the same micro-batch's tensors, each at its *place*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

REPLICAS = "replicas"
"""The axis of the replicas, in which each has all of every tensor."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Args:
        name: ``replicas``, or as the plan calls it.
        size: holders along it.
        dealt: whether these have micro-batches of their own.
    """

    name: str
    size: int
    dealt: bool = False


@dataclass(frozen=True, slots=True)
class Mesh:
    """The holders of a stage, numbered along the axes: the last one's coordinate counts fastest.

    Args:
        axes: those that are dealt first.
    """

    axes: tuple[Axis, ...]

    @staticmethod
    def of(replicas: int, axes: Mapping[str, int]) -> Mesh:
        """The replicas, and within each of them the axes of a plan's mesh."""
        return Mesh((Axis(REPLICAS, replicas, dealt=True), *(Axis(name, size) for name, size in axes.items())))

    @property
    def replicas(self) -> int:
        """R: groups of holders that have micro-batches of their own."""
        return math.prod(axis.size for axis in self.axes if axis.dealt)

    @property
    def places(self) -> int:
        """Holders within a replica."""
        return math.prod(axis.size for axis in self.axes if not axis.dealt)

    @property
    def size(self) -> int:
        """Holders of a stage."""
        return self.replicas * self.places

    @property
    def sizes(self) -> dict[str, int]:
        """Holders along each axis, by its name."""
        return {axis.name: axis.size for axis in self.axes}

    def coordinates(self, holder: int) -> dict[str, int]:
        """Where a holder stands along each axis."""
        found: dict[str, int] = {}
        for axis in reversed(self.axes):
            holder, found[axis.name] = divmod(holder, axis.size)
        return found

    def holder(self, replica: int, place: int) -> int:
        """The number of the holder at a place of a replica."""
        return replica * self.places + place

    def where(self, holder: int) -> tuple[int, int]:
        """The replica and the place of a holder."""
        return divmod(holder, self.places)

    def groups(self, name: str) -> list[list[int]]:
        """The holders that exchange along an axis: those that differ in nothing else, in the order of their numbers."""
        at = next(i for i, axis in enumerate(self.axes) if axis.name == name)
        size, stride = self.axes[at].size, math.prod(axis.size for axis in self.axes[at + 1 :])
        firsts = [number for number in range(self.size) if number // stride % size == 0]
        return [[first + i * stride for i in range(size)] for first in firsts]
