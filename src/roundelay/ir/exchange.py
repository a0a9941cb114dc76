"""Exchanges: what the holders of a tensor send each other so that its signature changes, as a list of phases.

In each phase every holder *puts* parts of its tensor, one for each holder, and then *reduces* what it gets to its sum
or maximum, in the order of the holders and with its own part in its place, or *joins* it side by side (OneFlow, Sect.
3.2 and Table 2; the collectives reduce-scatter, all-gather, all-to-all and all-reduce). The order makes the bits
independent of timing and transport.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from roundelay.errors import PlanError
from roundelay.ir.sbp import Reduction, bounds
from roundelay.ir.typed_text import Count, Number

WEIGHT_GRADIENT = "weight-gradient"
"""The kind of an exchange that sums the gradients of a stage's weights."""

GRADIENT_PARTS = "gradient-parts"
"""The kind of one that sums a segment's of one micro-batch, of which each replica gets a part."""

USED = WEIGHT_FORWARD, WEIGHT_BACKWARD = "weight-forward", "weight-backward"
"""The kinds of those that gather a segment's weights before its forward and its backward."""

_TEXT = re.compile(
    r"reduce-scatter(?P<max>-max)?\((?P<put>\d+)\)|all-gather\((?P<join>\d+)\)|all-to-all\((?P<from>\d+)>(?P<to>\d+)\)"
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of an exchange.

    Args:
        put: the dimension along which a holder cuts its tensor, part j for holder j; None: all of it for each.
        join: the dimension along which it joins what it gets; None: it reduces.
        op: how it reduces.
    """

    put: int | None
    join: int | None
    op: Reduction = "sum"

    def __str__(self) -> str:
        if self.join is None:
            return f"reduce-scatter{'-max' * (self.op == 'max')}({self.put})"
        return f"all-gather({self.join})" if self.put is None else f"all-to-all({self.join}>{self.put})"

    @staticmethod
    def parse(text: str) -> Phase:
        """The phase that prints as ``text``.

        Raises:
            PlanError: there is none.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(
                "a phase of an exchange",
                got=repr(text),
                expected="reduce-scatter(DIM), reduce-scatter-max(DIM), all-gather(DIM) or all-to-all(DIM>DIM), as in "
                "OneFlow's Table 2",
                remedy="Write a new plan with `roundelay plan`, or correct this line.",
            )
        put, join = match["put"] or match["to"], match["join"] or match["from"]
        op: Reduction = "max" if match["max"] else "sum"
        return Phase(None if put is None else int(put), None if join is None else int(join), op)


def reduce_scatter(dim: int = 0, op: Reduction = "sum") -> tuple[Phase, ...]:
    """From P to S(dim)."""
    return (Phase(dim, None, op),)


def all_gather(dim: int = 0) -> tuple[Phase, ...]:
    """From S(dim) to B."""
    return (Phase(None, dim),)


def all_to_all(source: int, target: int) -> tuple[Phase, ...]:
    """From S(source) to S(target)."""
    return (Phase(target, source),)


def all_reduce(dim: int = 0, op: Reduction = "sum") -> tuple[Phase, ...]:
    """From P to B, with what travels in between split along ``dim``: each element is reduced by one holder."""
    return reduce_scatter(dim, op) + all_gather(dim)


def elements_sent(phases: Sequence[Phase], shape: Sequence[int], holders: int, position: int) -> list[int]:
    """How many elements one holder sends in each phase.

    Args:
        phases: of the exchange.
        shape: of the whole tensor.
        holders: how many take part.
        position: the holder's among them.
    """
    split, sent = phases[0].join, []  # what is joined was split before, else it is partial
    for phase in phases:
        held = _elements(shape, (split,), holders, position)
        sent.append(
            (holders - 1) * held
            if phase.put is None
            else held - _elements(shape, (split, phase.put), holders, position)
        )
        split = phase.put
    return sent


def _elements(shape: Sequence[int], splits: Sequence[int | None], holders: int, position: int) -> int:
    """Elements of the part of a tensor that a holder has where these dimensions are split."""
    sizes = list(shape)
    for dim in splits:
        if dim is not None:
            start, end = bounds(shape[dim], holders)[position]
            sizes[dim] = end - start
    return math.prod(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """What some holders of a stage exchange: gradients of weights once a batch, boxed values with every micro-batch.

    Args:
        stage: whose.
        kind: of what: ``weight-gradient``, ``gradient-parts``, ``weight`` (updated ones), ``weight-forward`` and
            ``weight-backward`` (those of a segment, before it runs), ``boxed`` or ``boxed-gradient``.
        axis: among whom: ``replicas``, or an axis of the mesh.
        value: name of the boxed value; empty for gradients of weights.
        segment: number of the stage's segment after which the boxing stands, or whose weights or gradients they are.
        phases: how; none where holders hand on sums one after another.
        dtypes: of the tensors that are exchanged together.
        shapes: of each of them, on a full micro-batch: flat, or what is split, as dimension 1.
        unused: names of trained parameters of the stage that get no gradient.
        seconds: predicted, from where all have begun to where each has all; 0 where not known: by the plan's
            ``latency_s`` and ``bytes_per_s``.
        busy_s: predicted seconds that each holder computes for it before.
    """

    stage: Count
    kind: str
    axis: str
    value: str
    segment: Count
    phases: tuple[Phase, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[Count, ...], ...]
    unused: tuple[str, ...]
    seconds: Number = 0.0
    busy_s: Number = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(
            [itemsize(dtype) * math.prod(shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes)

    def bytes_sent(self, holders: int, position: int) -> list[int]:
        """Bytes that one holder sends in each phase.

        Args:
            holders: how many take part.
            position: the holder's among them.
        """
        if not self.phases:  # each but the last sends a partial sum, and each but one the total
            return [self.num_bytes * (position + 1 < holders), self.num_bytes * (position + 2 != holders)]
        each = [
            [size * count for count in elements_sent(self.phases, shape, holders, position)]
            for size, shape in zip(map(itemsize, self.dtypes), self.shapes, strict=True)
        ]
        return [sum(of_phase) for of_phase in zip(*each, strict=True)] or [0] * len(self.phases)


@cache
def itemsize(dtype: str) -> int:
    """Bytes of an element, from torch's name of a dtype: its bits are in it."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) // 8
