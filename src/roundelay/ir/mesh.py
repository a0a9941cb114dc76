"""Meshes: which of a stage's holders is which, by axes.

The first axes are *dealt*: along them holders have micro-batches of their own, as replicas do. Along the others they
have parts of the same micro-batch's tensors, each at its *place*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

REPLICAS = "replicas"
"""The axis of the replicas, of which each has micro-batches of its own."""

COPIES, SHARDS = "copies", "shards"
"""Its two axes under hybrid sharding: groups of replicas, and the replicas of a group, of which each stores a part."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Args:
        name: ``replicas``, ``copies``, ``shards``, or as the plan calls it.
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
    def of(replicas: int, axes: Mapping[str, int], shards: int = 0) -> Mesh:
        """The replicas, in groups of ``shards`` unless that is 0, and within each of them the axes of a plan's mesh."""
        dealt = {COPIES: replicas // shards, SHARDS: shards} if shards else {REPLICAS: replicas}
        return Mesh(
            (
                *(Axis(name, size, dealt=True) for name, size in dealt.items()),
                *(Axis(name, size) for name, size in axes.items()),
            )
        )

    @property
    def replicas(self) -> int:
        """R: groups of holders that have micro-batches of their own."""
        return math.prod(axis.size for axis in self.axes if axis.dealt)

    @property
    def shards(self) -> int:
        """S: neighbouring replicas among which a parameter is split that is not whole in each."""
        return self.sizes.get(SHARDS, self.replicas)

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
        return {REPLICAS: self.replicas} | {axis.name: axis.size for axis in self.axes}

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
        along = [axis.name for axis in self.axes if axis.name == name or (axis.dealt and name == REPLICAS)]
        found: dict[tuple[int, ...], list[int]] = {}
        for holder in range(self.size):
            rest = tuple([at for axis, at in self.coordinates(holder).items() if axis not in along])
            found.setdefault(rest, []).append(holder)
        return list(found.values())
