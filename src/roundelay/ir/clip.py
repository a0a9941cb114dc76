"""Gradient clipping as data: whose norm is bounded, and by what.

``none`` clips nothing. ``stage:NORM`` scales the gradients of each stage so that their common 2-norm is at most NORM:
it needs nothing from other stages, so it costs no message under any rule. It is not the norm of the whole model's
gradient, which in asynchronous pipelines is complete only after the last stage has gone on.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from roundelay.errors import PlanError

EPSILON = 1e-6
"""Added to a norm before it divides, as torch's own clipping does."""

_TEXT = re.compile(r"stage:(?P<norm>[0-9.eE+-]+)")


@dataclass(frozen=True, slots=True)
class Clip:
    """What is clipped.

    Args:
        by: ``none``, or ``stage``: each stage by the norm of its own gradients.
        norm: the largest norm that stays; 0 for ``none``.
    """

    by: Literal["none", "stage"] = "none"
    norm: float = 0.0

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
                expected="none, or stage:NORM with a norm above 0, such as stage:1.0",
                remedy="Correct the plan or --clip.",
            )
        return Clip("stage", norm)


NO_CLIP = Clip()
