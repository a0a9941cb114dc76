"""Charts as a PNG image, drawn by matplotlib, an optional package."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from roundelay.optional_packages import optional
from roundelay.page.comparison_page import Chart, style_of
from roundelay.page.scale import LOG_FROM

MATPLOTLIB = "matplotlib.figure"

WIDE, TALL, DPI = 13.0, 4.2, 110
"""Width and height of a pair of charts in inches, and dots per inch."""

FigureClass = Callable[..., Any]
"""``matplotlib.figure.Figure``, which draws without a display and without global state (unlike pyplot)."""


def load_matplotlib() -> FigureClass:
    """Import and return ``matplotlib.figure.Figure``.

    Raises:
        UsageError: matplotlib is not installed, or cannot be loaded.
    """
    remedy = "; the HTML page has the same curves without it."
    figure_class: FigureClass = optional(MATPLOTLIB, "pictures as PNG", "matplotlib", remedy).Figure
    return figure_class


def draw_png(figure_class: FigureClass, title: str, charts: Sequence[Chart]) -> bytes:
    """Draw all charts in one column of pairs, over updates (left) and over time (right); returns the PNG file.

    Args:
        figure_class: what :func:`load_matplotlib` returns.
        title: above the charts.
        charts: at least one.
    """
    figure = figure_class(figsize=(WIDE, TALL * len(charts)), dpi=DPI, layout="constrained")
    figure.suptitle(_escaped(title))
    axes = figure.subplots(len(charts), 2, squeeze=False, sharey="row")
    lines = list(dict.fromkeys(name for chart in charts for name, _ in chart.over_updates))
    for chart, (left, right) in zip(charts, axes, strict=True):
        _draw(left, chart, lines, "updates")
        _draw(right, chart, lines, "seconds")
    if lines:
        axes[0][1].legend(fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(axes: Any, chart: Chart, lines: Sequence[str], x_label: str) -> None:
    values: list[float] = []
    for name, points in chart.over_updates if x_label == "updates" else chart.over_time:
        colour, dashes = style_of(lines.index(name))
        pattern = (0, tuple(map(float, dashes.split()))) if dashes else "solid"
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, color=colour, linestyle=pattern, label=_escaped(name), marker="." if chart.dots else "")
        values += ys
    if values and min(values) > 0 and max(values) / min(values) > LOG_FROM:
        axes.set_yscale("log")
    axes.set(xlabel=x_label, ylabel=_escaped(chart.name))
    axes.grid(visible=True, alpha=0.3)


def _escaped(text: str) -> str:
    """Escape ``$``, which begins a formula in matplotlib, and a leading ``_``, which hides a label."""
    return " " * text.startswith("_") + text.replace("$", r"\$")
