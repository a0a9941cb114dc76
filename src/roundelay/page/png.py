"""Charts as a PNG picture, drawn by matplotlib, an optional package."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from roundelay.observe.optional import optional
from roundelay.page.comparison_page import Chart, style_of
from roundelay.page.scale import LOG_FROM

DRAWER = "matplotlib.figure"

WIDE, TALL, DPI = 13.0, 4.2, 110
"""Inches of a pair of charts, and dots of an inch."""

Drawer = Callable[..., Any]
"""matplotlib's figure, which draws without a screen and keeps nothing global."""


def drawer() -> Drawer:
    """Matplotlib's figure.

    Raises:
        UsageError: matplotlib is not installed, or cannot be loaded.
    """
    without = "; the HTML page has the same curves without it."
    found: Drawer = optional(DRAWER, "pictures as PNG", "matplotlib", without).Figure
    return found


def picture(make: Drawer, title: str, charts: Sequence[Chart]) -> bytes:
    """All charts below one another, over updates on the left and over time on the right, as PNG.

    Args:
        make: as :func:`drawer` gives it.
        title: above them.
        charts: at least one.
    """
    figure = make(figsize=(WIDE, TALL * len(charts)), dpi=DPI, layout="constrained")
    figure.suptitle(_plain(title))
    places = figure.subplots(len(charts), 2, squeeze=False, sharey="row")
    lines = list(dict.fromkeys(name for chart in charts for name, _ in chart.over_updates))
    for chart, (left, right) in zip(charts, places, strict=True):
        _draw(left, chart, lines, "updates")
        _draw(right, chart, lines, "seconds")
    if lines:
        places[0][1].legend(fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(place: Any, chart: Chart, lines: Sequence[str], x_label: str) -> None:
    values: list[float] = []
    for name, points in chart.over_updates if x_label == "updates" else chart.over_time:
        colour, dashes = style_of(lines.index(name))
        pattern = (0, tuple(map(float, dashes.split()))) if dashes else "solid"
        xs, ys = [x for x, _ in points], [y for _, y in points]
        place.plot(xs, ys, color=colour, linestyle=pattern, label=_plain(name), marker="." if chart.dots else "")
        values += ys
    if values and min(values) > 0 and max(values) / min(values) > LOG_FROM:
        place.set_yscale("log")
    place.set(xlabel=x_label, ylabel=_plain(chart.name))
    place.grid(visible=True, alpha=0.3)


def _plain(text: str) -> str:
    """A dollar sign begins a formula there, and a label that begins with an underscore is left out."""
    return " " * text.startswith("_") + text.replace("$", r"\$")
