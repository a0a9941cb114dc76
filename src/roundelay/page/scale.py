"""Axes of the figures: values to pixels, ticks at round numbers, and numbers, durations and sizes as short text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

LOG_FROM = 50.0
"""Positive values whose largest is more than this many times their smallest are drawn on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis.

    Args:
        low: value at its start.
        high: value at its end; greater than ``low``.
        start: pixel of ``low``.
        end: pixel of ``high``.
        log: logarithmic; then both values are positive.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def fit_axis(values: Iterable[float], start: float, end: float, *, may_log: bool = False, zero: bool = False) -> Axis:
    """An axis that covers all finite values, with a margin.

    Args:
        values: what is to be shown; without any, the axis goes from 0 to 1.
        start: pixel of its low end.
        end: pixel of its high end.
        may_log: allow a logarithmic axis.
        zero: start at 0.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if may_log and low > 0 and high / low > LOG_FROM:
        return Axis(low / 1.1, high * 1.1, start, end, log=True)
    low = min(low, 0.0) if zero else low
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        padding = abs(high) / 10 or 1.0
        low, high = (low, high + padding) if zero else (low - padding, high + padding)
    margin = 0.0 if zero else 0.04 * (high - low)
    return Axis(low - margin, high + 0.04 * (high - low), start, end)


def ticks(axis: Axis, most: int) -> list[float]:
    """At most ``most`` round values on an axis, in increasing order: 1, 2, 2.5 or 5 times powers of ten."""
    if axis.log:
        first, last = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
        fine = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        for candidates in (fine, [10.0**e for e in range(first, last + 1)]):
            inside = [value for value in candidates if axis.low <= value <= axis.high]
            if len(inside) <= most:
                return inside
        return inside[:: -(-len(inside) // most)]
    step = _step((axis.high - axis.low) / max(1, most - 1))
    first = math.ceil(axis.low / step - 1e-9)
    return [n * step for n in range(first, math.floor(axis.high / step + 1e-9) + 1)]


def _step(least: float) -> float:
    """The smallest round number that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= least * (1 - 1e-9))


def labelled_grid(across: Axis, most: int, bottom: float, label_y: float, as_text: Callable[[float], str]) -> list[str]:
    """Vertical lines at round values of a horizontal axis as SVG, down to ``bottom``, with their labels below."""
    elements = []
    for value in ticks(across, most):
        x = across.place(value)
        elements.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom:g}"/>')
        anchor, text = "end" if x > across.end - 10 else "middle", escape(as_text(value))
        elements.append(f'<text class="tick" x="{x:.1f}" y="{label_y:g}" text-anchor="{anchor}">{text}</text>')
    return elements


def short(value: float) -> str:
    """A number as a label: at most four significant digits."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: float) -> str:
    """A duration as text: ``12 ms``, ``3.5 s``, ``2 min 5 s``."""
    if value < 1.0:
        return f"{short(value * 1e3)} ms"
    if value < 120.0:
        return f"{short(value)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(num_bytes: float) -> str:
    """A number of bytes as text, in powers of ten, as in the plan's comments."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"
