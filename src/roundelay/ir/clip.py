"""Gradient clipping as data: whose norm is bounded, and by what.

========================  =====================================================================================
``none``                  nothing is clipped
``stage:NORM``            each stage's gradients, by their own 2-norm: no message, under any rule
``previous:NORM``         all gradients, by the whole model's norm of the newest batch that stage 0 knew
``global:NORM``           all gradients, by the whole model's norm of their own batch; flushing rules only
========================  =====================================================================================

The whole model's norm is complete when stage 0 has finished the batch, in asynchronous pipelines after the last stage
has gone on. So with ``previous`` squares ride on the gradient messages of a batch's last micro-batch to stage 0, and
their sum's root comes back with every micro-batch that stage 0 sends forward; with ``global`` stage 0 sends it back on
channels of its own, and updates wait for it. Where backwards run in two halves, gradients are whole behind the last of
these messages, and squares have channels of their own as well.
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
    """What is clipped.

    Args:
        by: ``none``; ``stage``: each stage by the norm of its own gradients; ``previous`` and ``global``: by that of
            the whole model's, of an earlier batch or of the same one.
        norm: the largest norm that stays; 0 for ``none``.
    """

    by: Literal["none", "stage", "previous", "global"] = "none"
    norm: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether it asks for the norm of the whole model's gradient, to which every stage adds its part."""
        return self.by in ("previous", "global")

    @staticmethod
    def parse(text: str) -> Clip:
        """From a plan's text.

        Raises:
            PlanError: it says nothing that is known.
        """
        if text == "none":
            return Clip()
        found = _TEXT.fullmatch(text)
        try:
            norm = float(found["norm"]) if found else 0.0
        except ValueError:
            norm = 0.0
        if norm <= 0 or not math.isfinite(norm):
            raise PlanError(
                "clip of the plan",
                got=repr(text),
                expected="none, or stage:NORM, previous:NORM or global:NORM with a norm above 0, such as stage:1.0",
                remedy="Correct the plan or --clip.",
            )
        return Clip(found["by"], norm)  # type: ignore[arg-type,index]


NO_CLIP = Clip()
