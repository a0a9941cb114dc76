"""Actions: what a stage does, without how. ``2F0`` is stage 2's forward of micro-batch 0.

A list of actions per stage is a schedule written out; the grid prints it as a staircase, one row per stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from roundelay.errors import UsageError

Kind = Literal["F", "B", "W", "U"]

_PATTERN = re.compile(r"(0|[1-9][0-9]{0,17})([FBWU])(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class Action:
    """One action.

    Args:
        stage: k, from 0.
        kind: ``F`` forward, ``B`` backward, ``W`` the weights' half of a backward, ``U`` update.
        number: the micro-batch g of a forward or backward, the batch t of an update.
    """

    stage: int
    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as ``text``.

        Raises:
            UsageError: no action prints so.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise UsageError(
                "an action",
                got=repr(text),
                expected="stage number, F, B, W or U, and a number, such as 2F0",
                remedy="Correct the text.",
            )
        stage, kind, number = match.groups()
        return Action(int(stage), kind, int(number))  # type: ignore[arg-type]


def grid(columns: Mapping[int, Sequence[str]], num_columns: int, whose: str = "stage") -> str:
    """A staircase: one row per stage or worker, one column per time slot.

    Args:
        columns: number to its cells, the empty string where it waits.
        num_columns: number of time slots.
        whose: what a row is of.
    """
    width = max((len(cell) for cells in columns.values() for cell in cells), default=1)
    digits = len(str(max(columns, default=0)))
    rows = []
    for k in sorted(columns):
        cells = [*columns[k], *[""] * (num_columns - len(columns[k]))]
        rows.append(f"{whose} {k:>{digits}} |" + " ".join((cell or "·").center(width) for cell in cells).rstrip())
    return "\n".join(rows)
