"""The loss scale as data: losses are multiplied by it so that gradients in half precision do not underflow.

========================  =====================================================================================
``none``                  no scaling
``N``                     a constant power of two
``dynamic``               65536 at first; halved after a batch whose gradients are not finite, doubled after 2000
                          batches in a row with finite gradients
``dynamic:N``             the same, N at first
``dynamic:N:COUNT``       the same, doubled after COUNT batches in a row
========================  =====================================================================================

Stage 0 chooses the scale of each micro-batch, and its header carries it, since under an asynchronous rule micro-batches
with different scales are in flight. Scales are powers of two, so that multiplying and dividing by them is exact unless
something overflows or underflows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roundelay.errors import PlanError

DYNAMIC = "dynamic"
FIRST = 65536.0
COUNT = 2000
LEAST, MOST = 2.0**-24, 2.0**40
"""Bounds of a dynamic scale: below the first the run ends with an error; above the second it does not grow."""

HOPELESS = 64
"""Batches in a row without finite gradients that end a run with a constant scale: halvings from MOST to LEAST."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """How losses are scaled.

    Args:
        first: the scale at the start; 0 for no scaling.
        count: batches in a row with finite gradients after which the scale doubles; 0 for a constant scale.
    """

    first: float = 0.0
    count: int = 0

    @property
    def on(self) -> bool:
        """Whether losses are scaled."""
        return self.first > 0

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return self.count > 0

    def __str__(self) -> str:
        if not self.dynamic:
            return str(int(self.first)) if self.on else "none"
        usual = (self.first, self.count) == (FIRST, COUNT)
        return DYNAMIC + ("" if usual else f":{int(self.first)}" + (f":{self.count}" if self.count != COUNT else ""))

    @staticmethod
    def parse(text: str) -> LossScale:
        """The scale that prints as ``text``; there may be other texts of the same scale.

        Raises:
            PlanError: the text has none of the forms above.
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
