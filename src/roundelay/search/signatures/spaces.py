"""What a search over signatures chooses from, and that of all ways over whole axes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from roundelay.ir.layout import Lay
from roundelay.search.signatures.boxing_prices import BoxingPrices, Link, Table
from roundelay.search.signatures.local_forms import LocalOp
from roundelay.search.signatures.ways import Letter, State, Way, state, ways


class Prices(Protocol):
    """Seconds of the boxings of tensors of one size."""

    def of_states(self, sources: Sequence[State], targets: Sequence[State]) -> Table:
        """Forward from source to target, and backward from the target's gradient to the source's."""


class Space(Protocol):
    """Ways of operations on a mesh."""

    @property
    def mesh(self) -> Mapping[str, int]:
        """Workers along each axis, by its name."""

    @property
    def full(self) -> bool:
        """Whether between operations tensors are divided among all workers, as far as they can be."""

    def ways(self, op: LocalOp, found: Sequence[Letter]) -> list[Way]:
        """Of an operation, by its letters."""

    def state(self, op: LocalOp, way: Way, port: int) -> State:
        """How a tensor of an operation lies, by its number among those that it reads and produces."""

    def key(self, op: LocalOp) -> Hashable:
        """What operations must have in common to be computed alike, beside their form."""

    def prices(self, lays: Iterable[Lay], links: Mapping[str, Link], num_bytes: float) -> Prices:
        """Of boxings between these lays of a tensor of so many bytes."""


class Axes:
    """All ways over whole axes.

    Args:
        mesh: workers along each axis, by its name.
    """

    full = False

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh

    def ways(self, op: LocalOp, found: Sequence[Letter]) -> list[Way]:
        """All ways of an operation, by its letters."""
        return ways(op, found, self.mesh)

    def state(self, op: LocalOp, way: Way, port: int) -> State:
        """How a tensor of an operation lies, by its number among those that it reads and produces."""
        return state(op, way, port, self.mesh)

    def key(self, op: LocalOp) -> Hashable:
        """Nothing: the ways of an operation follow from its form."""
        return ()

    def prices(self, lays: Iterable[Lay], links: Mapping[str, Link], num_bytes: float) -> BoxingPrices:
        """Of boxings between these lays of a tensor of so many bytes."""
        return BoxingPrices(lays, self.mesh, links, num_bytes)
