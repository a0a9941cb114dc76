"""Averages of weights: their names among the entries of optimizer states, and what a plan says where there are none."""

from __future__ import annotations

NO_EMA = 0.0
"""What a plan says where no average is kept."""

EMA = "roundelay.ema"
"""A parameter's exponential moving average, among the entries of its optimizer state in a snapshot or checkpoint."""

EVALUATED = "roundelay.eval"
"""A parameter as the optimizer's own ``eval()`` makes it (schedule-free optimizers), likewise."""
