"""Seconds of collectives by α and β, on a machine of one or more levels (AutoDDL, Sects. 3.1, 4.2.3; Table 2).

A group of devices is a factor of the machine: how many parts of each level it spans. It communicates over the link of
the outermost level that it spans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

Factor = tuple[int, ...]
"""Parts of each level, from the outermost: (nodes, devices of a node), or (devices,) of a machine of one level."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a machine: nodes, or the devices of each.

    Args:
        size: how many; a power of two.
        latency_s: α of the link between them.
        bytes_per_s: 1/β.
    """

    size: int
    latency_s: float
    bytes_per_s: float


Machine = tuple[Level, ...]
"""From the outermost level."""


def counting(*sizes: int) -> Machine:
    """A machine on which a second is a byte: α is 0 and β is 1."""
    return tuple(Level(size, 0.0, 1.0) for size in sizes)


def ring(machine: Machine, group: Factor, num_bytes: float) -> float:
    """An all-gather, a reduce-scatter or an all-to-all: (p - 1) α + (p - 1)/p n β.

    Args:
        machine: where.
        group: of p devices.
        num_bytes: n, on each device; of a reduce-scatter its input, else the output.
    """
    size = math.prod(group)
    if size == 1:
        return 0.0
    link = next(level for level, part in zip(machine, group, strict=True) if part > 1)
    return (size - 1) * link.latency_s + (size - 1) / size * num_bytes / link.bytes_per_s


def all_reduce(machine: Machine, group: Factor, num_bytes: float) -> float:
    """An all-reduce: 2 (p - 1) α + 2 (p - 1)/p n β."""
    return 2 * ring(machine, group, num_bytes)


def halving(machine: Machine, group: Factor, num_bytes: float) -> float:
    """A reduce-scatter by halves, innermost level first: log2 p α; an all-gather by doubling takes as long.

    The bytes are those of a ring; only the last of them cross the outer level.
    """
    seconds = 0.0
    for level, part in zip(reversed(machine), reversed(group), strict=True):
        seconds += (part.bit_length() - 1) * level.latency_s + (part - 1) / part * num_bytes / level.bytes_per_s
        num_bytes /= part
    return seconds


def all_to_alls(machine: Machine, group: Factor, num_bytes: float) -> float:
    """An all-to-all level by level, each at once or one after another in parts of it, whichever is faster."""
    bits = (part.bit_length() - 1 for part in group)
    return sum(_in_parts(level, count, num_bytes) for level, count in zip(machine, bits, strict=True))


@cache
def _in_parts(level: Level, bits: int, num_bytes: float) -> float:
    """Among 2 to the ``bits`` parts of a level."""
    parts = range(1, bits + 1)
    ways = (ring((level,), (1 << n,), num_bytes) + _in_parts(level, bits - n, num_bytes) for n in parts)
    return min(ways, default=0.0)
