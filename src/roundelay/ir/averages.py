"""Averages of weights: their names among the entries of optimizer states, and the decay that a plan may say."""

from __future__ import annotations

from roundelay.errors import PlanError

NO_EMA = 0.0
"""What a plan says where no average is kept."""

EMA = "roundelay.ema"
"""A parameter's exponential moving average, among the entries of its optimizer state in a snapshot or checkpoint."""

EVALUATED = "roundelay.eval"
"""A parameter as the optimizer's own ``eval()`` makes it (schedule-free optimizers), likewise."""


def check_ema(decay: float) -> None:
    """Refuse a decay that averages nothing.

    Raises:
        PlanError: it is not in [0, 1).
    """
    if not 0.0 <= decay < 1.0:
        raise PlanError(
            "ema of the plan",
            got=f"{decay:g}",
            expected="a decay from 0 (no average) to less than 1, such as 0.999",
            remedy="Correct --ema, Job(ema=...) or the plan.",
        )
