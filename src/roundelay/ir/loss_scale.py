"""The loss scale as data: by what the loss of a micro-batch is multiplied, so that gradients in half precision last.

========================  =====================================================================================
``none``                  nothing is scaled
``N``                     by N, a power of two, always
``dynamic``               by 65536 at first; halved behind a batch whose gradients are not finite, doubled behind
                          2000 in a row that are
``dynamic:N``             the same, by N at first
``dynamic:N:COUNT``       the same, doubled behind COUNT
========================  =====================================================================================

Stage 0 chooses the scale of each micro-batch, which carries it: several are in flight at once under an asynchronous
rule. Scales are powers of two: to multiply and to divide by one is exact, as long as nothing over- or underflows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roundelay.errors import PlanError

DYNAMIC = "dynamic"
FIRST = 65536.0
COUNT = 2000
LEAST, MOST = 2.0**-24, 2.0**40
"""A dynamic scale ends the run below the least, and does not grow beyond the most."""

HOPELESS = 64
"""Batches in a row without finite gradients that end a run with a constant scale: as many as halve most to least."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """What a loss is multiplied by.

    Args:
        first: by what at first; 0: nothing is scaled.
        count: batches in a row with finite gradients behind which it doubles; 0: it never changes.
    """

    first: float = 0.0
    count: int = 0

    @property
    def on(self) -> bool:
        """Whether anything is scaled."""
        return self.first > 0

    @property
    def dynamic(self) -> bool:
        """Whether it changes."""
        return self.count > 0

    @staticmethod
    def parse(text: str) -> LossScale:
        """From a plan's text.

        Raises:
            PlanError: it says nothing that is known.
        """
        if text == "none":
            return LossScale()
        word, *numbers = text.split(":") if text.startswith(DYNAMIC) else ("", text)
        values = [int(number) for number in numbers if re.fullmatch("[0-9]{1,13}", number)]
        known = word in ("", DYNAMIC) and len(values) == len(numbers) <= 2 and 0 not in values
        if not known or (values and (values[0] & (values[0] - 1) or values[0] > MOST)):
            raise PlanError(
                "loss_scale of the plan",
                got=repr(text),
                expected="none, a power of two up to 2**40 such as 1024, or dynamic, dynamic:FIRST or "
                "dynamic:FIRST:COUNT with such a power and a whole number above 0",
                remedy="Correct the plan or --loss-scale.",
            )
        first = float(values[0]) if values else FIRST
        return LossScale(first, (values[1] if len(values) == 2 else COUNT) if word else 0)


NO_SCALE = LossScale()
