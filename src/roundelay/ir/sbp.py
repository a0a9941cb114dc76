"""Signatures: how a tensor lies on the workers of one mesh axis (OneFlow, Sect. 3.1; AutoDDL, Sect. 3).

=========  =======================================================================
``S(1)``   split along dimension 1: each worker has a part
``S(1/3)`` the same where dimension 1 consists of 3 equal blocks, each of them split
``B``      broadcast: each worker has all of it
``P``      partial: the tensor is the sum of what the workers have
``P(max)`` the same with the largest of what they have; nothing flows back through it
=========  =======================================================================

A split reads its dimension as ``(outer, m, unit)`` and divides ``m``: in balanced parts, the first ones longer by one.
``S(1/3*64)`` splits a fused q|k|v of heads of 64 numbers: 3 blocks of m heads, each of 64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from roundelay.errors import PlanError

Reduction = Literal["sum", "max"]
"""How values become one, number by number."""

_TEXT = re.compile(r"S\((\d+)(?:/([1-9]\d*))?(?:\*([1-9]\d*))?\)")


@dataclass(frozen=True, slots=True)
class Split:
    """``S(dim)``.

    Args:
        dim: the dimension, from 0.
        outer: equal blocks of the dimension, each of which is split.
        unit: numbers that stay together.
    """

    dim: int
    outer: int = 1
    unit: int = 1

    def __str__(self) -> str:
        return f"S({self.dim}{f'/{self.outer}' * (self.outer != 1)}{f'*{self.unit}' * (self.unit != 1)})"

    def count(self, size: int) -> int:
        """m, what is divided among the workers, of a dimension of this size."""
        return size // (self.outer * self.unit)

    def fits(self, size: int) -> bool:
        """Whether a dimension of this size can be read so."""
        return size % (self.outer * self.unit) == 0

    def ranges(self, size: int, parts: int, part: int) -> list[tuple[int, int]]:
        """Where the part of a dimension of this size lies: a range for each block."""
        start, end = bounds(self.count(size), parts)[part]
        block = size // self.outer
        return [(i * block + start * self.unit, i * block + end * self.unit) for i in range(self.outer)]

    def local_size(self, size: int, parts: int, part: int) -> int:
        """The size of that part."""
        each, rest = divmod(self.count(size), parts)
        return self.outer * (each + (part < rest)) * self.unit


@dataclass(frozen=True, slots=True)
class Broadcast:
    """``B``."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """``P``, or ``P(max)``.

    Args:
        op: how what the workers have becomes the tensor.
    """

    op: Reduction = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Signature = Split | Broadcast | Partial

B, P, P_MAX = Broadcast(), Partial(), Partial("max")

_WHOLE: dict[str, Signature] = {str(signature): signature for signature in (B, P, P_MAX)}


def parse(text: str) -> Signature:
    """The signature that prints as ``text``.

    Raises:
        PlanError: there is none.
    """
    if text in _WHOLE:
        return _WHOLE[text]
    match = _TEXT.fullmatch(text)
    if match is None:
        raise PlanError(
            "a signature",
            got=repr(text),
            expected="S(DIM), S(DIM/BLOCKS), S(DIM/BLOCKS*UNIT), B, P or P(max)",
            remedy="Correct the plan or the option.",
        )
    return Split(*[int(number or 1) for number in match.groups()])


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Where the parts of a size begin and end: balanced, the first ones longer by one (OneFlow's split)."""
    each, rest = divmod(size, parts)
    starts = [i * each + min(i, rest) for i in range(parts + 1)]
    return list(pairwise(starts))


def local_shape(shape: Sequence[int], signature: Signature, parts: int, part: int) -> tuple[int, ...]:
    """The shape of what one worker has of a tensor."""
    sizes = list(shape)
    if isinstance(signature, Split):
        sizes[signature.dim] = signature.local_size(sizes[signature.dim], parts, part)
    return tuple(sizes)
