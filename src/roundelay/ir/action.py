"""Actions: the steps of a schedule. ``2F0`` is stage 2's forward of micro-batch 0.

A list of actions per stage is a schedule written out; :func:`grid` prints it, one row per stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from roundelay.errors import UsageError

Kind = Literal["F", "B", "W", "A", "T", "U", "R", "D", "h", "H", "p", "P"]

_PATTERN = re.compile(r"(0|[1-9][0-9]{0,17})([FBWATU])(0|[1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True)
class Action:
    """One action.

    Args:
        stage: k, from 0.
        kind: ``F`` forward, ``B`` backward, ``W`` the weight half of a backward, ``A`` adding to a sum of gradients,
            ``T`` sharing their total, ``U`` update; ``R`` reading, ``D`` giving data to the next worker; ``h`` and
            ``H`` waiting for a stage's state before its forward and its backward, ``p`` and ``P`` handing it on after
            them.
        number: the micro-batch g of a forward or backward, the batch t of the others.
    """

    stage: int
    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"

    @staticmethod
    def parse(text: str) -> Action:
        """Parse the printed form of an action.

        Raises:
            UsageError: ``text`` is not an action.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise UsageError(
                "an action",
                got=repr(text),
                expected="stage number, F, B, W, A, T or U, and a number, such as 2F0",
                remedy="Correct the text.",
            )
        stage, kind, number = match.groups()
        return Action(int(stage), kind, int(number))  # type: ignore[arg-type]


def grid(cells_of: Mapping[int, Sequence[str]], num_columns: int, label: str = "stage") -> str:
    """Print a schedule as a grid: one row per stage or worker, one column per time slot.

    Args:
        cells_of: number of the stage or worker to its cells; an empty string where it waits.
        num_columns: number of time slots.
        label: ``stage`` or ``worker``, the label of a row.
    """
    width = max((len(cell) for cells in cells_of.values() for cell in cells), default=1)
    digits = len(str(max(cells_of, default=0)))
    rows = []
    for k in sorted(cells_of):
        cells = [*cells_of[k], *[""] * (num_columns - len(cells_of[k]))]
        rows.append(f"{label} {k:>{digits}} |" + " ".join((cell or "·").center(width) for cell in cells).rstrip())
    return "\n".join(rows)
