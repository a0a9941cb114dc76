"""AutoDDL's space: p = p0 p1 p2 devices for each linear layer I W = O of a chain (Sects. 4.2, 4.5).

I lies as (S0: p0, B: p1, S1: p2), W as (B: p0, S1: p1, S0: p2), so that O is (S0: p0, S1: p1, P: p2). W's gradient is
summed over p0. Only how many devices a letter has counts, not which: 36 triples for 128 equal devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from roundelay.errors import UsageError
from roundelay.planner.autoddl.collectives import Factor, Machine


class Triple(NamedTuple):
    """How a layer is split.

    Args:
        p0: by how many devices rows of I and O are split.
        p1: columns of W and O.
        p2: columns of I and rows of W.
    """

    p0: Factor
    p1: Factor
    p2: Factor

    def __str__(self) -> str:
        return f"({','.join('·'.join(map(str, factor)) for factor in self)})"


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer.

    Args:
        name: as the model calls it.
        inputs: columns of I.
        outputs: columns of O.
        summed: elements of W whose gradients are summed; None: all, inputs x outputs.
    """

    name: str
    inputs: int
    outputs: int
    summed: int | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """Linear layers one after another; what is between two of them runs on tensors that are split over all devices.

    Args:
        layers: from the first.
        rows: of every tensor: samples or tokens of a batch.
        before: what the first layer reads: `free` data in any layout, without a gradient; `rows`, a tensor whose rows
            are split over all devices; `last`, the output of the last layer, as in equal blocks that share a strategy.
        element_bytes: bytes of an element.
        replicated: elements of weights that all devices have beside the chain; their gradients are summed.
    """

    layers: Sequence[Linear]
    rows: int
    before: Literal["free", "rows", "last"]
    element_bytes: int = 4
    replicated: int = 0


def data_parallel(machine: Machine) -> Triple:
    """Rows split over all devices."""
    one = (1,) * len(machine)
    return Triple(tuple(level.size for level in machine), one, one)


def triples(machine: Machine, most_p0: int | None = None) -> tuple[Triple, ...]:
    """All of a layer.

    Args:
        machine: on which.
        most_p0: how many copies of a weight memory allows (Sect. 4.5.2); None: any number.

    Raises:
        UsageError: a level's size is not a power of two.
    """
    sizes = [level.size for level in machine]
    if not all(size > 0 and size.bit_count() == 1 for size in sizes):
        raise UsageError(
            "levels of a machine", got=str(sizes), expected="powers of two", remedy="Give other numbers of devices."
        )
    by_level = itertools.product(*map(_splits, sizes))
    found = (Triple(*zip(*split, strict=True)) for split in by_level)
    return tuple(triple for triple in found if most_p0 is None or math.prod(triple.p0) <= most_p0)


def _splits(size: int) -> list[tuple[int, int, int]]:
    powers = [1 << n for n in range(size.bit_length())]
    return [(a, b, size // (a * b)) for a in powers for b in powers if a * b <= size]
