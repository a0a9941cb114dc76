"""The form of an operation: which factors of its tensors' dimensions go together, so that they are split together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundelay.ir.sbp import Reduction


@dataclass(frozen=True, slots=True)
class Varying:
    """A size that may vary with the batch: all that can be said of it without torch.

    Args:
        text: as torch writes it.
        number: what it is, if it is a number though nobody promises so; else 0.
    """

    text: str
    number: int

    def __mul__(self, other: Any) -> Varying:
        return Varying(f"{self.text}*{other}", self.number * int(other))

    __rmul__ = __mul__

    def __int__(self) -> int:
        return self.number


def number_of(size: Any) -> int:
    """A size as a number; 0 if it may vary with the batch."""
    return int(size) if isinstance(size, int | Varying) or size.is_number else 0


Factor = tuple[int | None, Any]
"""Label, or None for a factor that stays whole; and size, an int or a symbolic one."""

Dims = tuple[tuple[Factor, ...], ...]
"""For each dimension its factors, from the outermost to the innermost."""


@dataclass(frozen=True, slots=True)
class OpForm:
    """The form of one operation.

    Args:
        args: for each tensor that it reads, by name, the labels of its dimensions.
        results: labels of the dimensions of each result.
        linear: groups of arguments in which it is linear together, while all others stay as they are.
        sizes: positions of the arguments that are the sizes of the result's dimensions.
        reduction: how what the workers have becomes a result that lacks a split label.
        over: an argument and its dimension over which a softmax runs; it is written out where that is split.
        known: whether anything is known of it; if not, every worker computes all of it.
    """

    args: Mapping[str, Dims]
    results: tuple[Dims, ...]
    linear: tuple[frozenset[str], ...] = ()
    sizes: tuple[int, ...] = ()
    reduction: Reduction = "sum"
    over: tuple[str, int] | None = None
    known: bool = True
