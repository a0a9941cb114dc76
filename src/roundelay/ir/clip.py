"""Gradient clipping as data: which norm is bounded, and the bound.

========================  =====================================================================================
``none``                  nothing is clipped
``stage:NORM``            each stage's gradients by their own 2-norm; works with every rule, sends no messages
``previous:NORM``         all gradients by the norm of the whole model's gradient of an earlier batch: the newest one
                          that stage 0 had finished when the batch's last micro-batch entered
``global:NORM``           all gradients by the norm of the whole model's gradient of their own batch; flushing rules,
                          and in the layout ``dp`` those that read older weights everywhere
========================  =====================================================================================

The norm of the whole model's gradient is known only when stage 0 has finished the batch; in asynchronous pipelines the
later stages have updated by then. Each stage sends the squared norm of its gradients to stage 0 on a channel. With
``previous``, the headers of the micro-batches that stage 0 then reads carry the norm. With ``global``, stage 0 sends it
to the other stages on channels, and their updates wait for it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from roundelay.errors import PlanError

EPSILON = 1e-6
"""Added to a norm before it divides, as torch's own clipping does."""

_TEXT = re.compile(r"(?P<by>stage|previous|global):(?P<norm>[0-9.eE+-]+)")


@dataclass(frozen=True, slots=True)
class Clip:
    """How gradients are clipped.

    Args:
        by: ``none``; ``stage``: by the norm of each stage's own gradients; ``previous`` and ``global``: by the norm of
            the whole model's gradient, of an earlier batch or of the same one.
        norm: the largest norm allowed; 0 for ``none``.
    """

    by: Literal["none", "stage", "previous", "global"] = "none"
    norm: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether the norm of the whole model's gradient is needed."""
        return self.by in ("previous", "global")

    def __str__(self) -> str:
        return self.by if self.by == "none" else f"{self.by}:{repr(self.norm).removesuffix('.0')}"

    @staticmethod
    def parse(text: str) -> Clip:
        """The clipping that prints as ``text``; there may be other texts of the same number.

        Raises:
            PlanError: the text has none of the forms above.
        """
        if text == "none":
            return Clip()
        match = _TEXT.fullmatch(text)
        try:
            norm = float(match["norm"]) if match else 0.0
        except ValueError:
            norm = 0.0
        if norm <= 0 or not math.isfinite(norm):
            raise PlanError(
                "clip of the plan",
                got=repr(text),
                expected="none, or stage:NORM, previous:NORM or global:NORM with a norm above 0, such as stage:1.0",
                remedy="Correct the plan or --clip.",
            )
        return Clip(match["by"], norm)  # type: ignore[arg-type,index]


NO_CLIP = Clip()
