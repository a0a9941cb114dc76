"""What lies between two layers: a reduce-scatter, an all-to-all, an all-gather (AutoDDL, Sect. 4.3).

From (S0: p0, S1: p1, P: p2) to (S0: p0', B: p1', S1: p2') through tensors that are split over all devices. The backward
is the mirror: each all-gather is a reduce-scatter of as many bytes, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roundelay.planner.autoddl.collectives import Factor, Machine, all_to_alls, halving, ring
from roundelay.planner.autoddl.space import Triple

Collective = Callable[[Machine, Factor, float], float]


@dataclass(frozen=True, slots=True)
class Boxing:
    """How boxings are made.

    Args:
        gather: seconds of an all-gather or a reduce-scatter.
        exchange: seconds of an all-to-all.
        group: from two triples to the devices among which the all-to-all is.
    """

    gather: Collective
    exchange: Collective
    group: Callable[[Triple, Triple], Factor]


def boxing_s(boxing: Boxing, machine: Machine, source: Triple, target: Triple, sizes: tuple[float, float]) -> float:
    """Seconds in the forward.

    Args:
        boxing: how.
        machine: where.
        source: the layer's whose output it is.
        target: the layer's that reads it.
        sizes: bytes of the whole output, and of the whole input that is made of it: of attention, a third.
    """
    written, read = sizes
    scattered = boxing.gather(machine, source.p2, written / math.prod(source.p0 + source.p1))
    devices = math.prod(level.size for level in machine)
    exchanged = boxing.exchange(machine, boxing.group(source, target), read / devices)
    return scattered + exchanged + boxing.gather(machine, target.p1, read / math.prod(target.p0 + target.p2))


def _as_published(source: Triple, target: Triple) -> Factor:
    """Where p1 = p2', rows are scattered and gathered, and nothing is left to exchange."""
    if source.p1 == target.p2:
        return (1,) * len(source.p0)
    return tuple(max(pair) // min(pair) for pair in zip(source.p0, target.p0, strict=True))


def _gap(source: Triple, target: Triple) -> Factor:
    """Between p0 .. p0 p2, in how many rows' parts the output can be scattered, and p0' .. p0' p1', of the input."""
    letters = zip(source.p0, source.p2, target.p0, target.p1, strict=True)
    return tuple(max(1, max(a, c) // min(a * b, c * d)) for a, b, c, d in letters)


PAPER = Boxing(ring, ring, _as_published)
"""One ring for each step."""

CHEAPEST = Boxing(halving, all_to_alls, _gap)
"""The cheapest path through split tensors: parts of P become parts of rows or of columns, whichever leaves less to
exchange, and steps go in rounds of two devices. Not in the paper."""
