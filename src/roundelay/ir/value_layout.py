"""What is known of a value before it comes: whether it is a tensor, of which dtype, and how large for how many rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from roundelay.ir.graph import ValueKind


@final
@dataclass(frozen=True, slots=True)
class ValueLayout:
    """What every micro-batch's value of one name has in common.

    Args:
        kind: only what is a tensor or a number is known.
        dtype: torch's name of a tensor's; empty if it may vary.
        sizes: of a tensor's dimensions: a number, ``-n`` for n of each row, None for one that may vary.
    """

    kind: ValueKind
    dtype: str
    sizes: tuple[int | None, ...]

    def due(self, dtype: str, shape: tuple[int, ...], rows: int) -> bool:
        """Whether a tensor of this dtype and shape may come for a micro-batch of so many rows."""
        return (
            self.kind != "number"
            and self.dtype in ("", dtype)
            and len(shape) == len(self.sizes)
            and all(
                size is None or actual == (size if size >= 0 else -size * rows)
                for size, actual in zip(self.sizes, shape, strict=True)
            )
        )
