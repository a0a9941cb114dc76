"""The HTML page of a comparison: its table, and the curves of every variant over updates and over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from roundelay.page.line_chart import Curve, Points, line_chart
from roundelay.page.sections import HALF, TALL, document, for_screens, legend, note, section, text_table

COLOURS = (
    "#3f76a8", "#cf7468", "#55915a", "#a27bb5", "#c8973c", "#4aa3a2",
    "#8c6d4f", "#d07ba6", "#7f8b2e", "#6672c4", "#7d8790", "#b0512f",
)  # fmt: skip
"""Colours of the first lines; later lines repeat them, dashed."""

DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True)
class Chart:
    """The curves of one quantity.

    Args:
        name: the quantity.
        over_updates: (name of a line, its points (updates, value)).
        over_time: (name of a line, its points (seconds, value)).
        dots: show each point as a dot.
    """

    name: str
    over_updates: Sequence[tuple[str, Points]]
    over_time: Sequence[tuple[str, Points]]
    dots: bool = False


def style_of(line: int) -> tuple[str, str]:
    """Colour and dash pattern of a line, by its number."""
    return COLOURS[line % len(COLOURS)], DASHES[line // len(COLOURS) % len(DASHES)]


def comparison_page(title: str, about: Sequence[str], table: Sequence[Sequence[str]], charts: Sequence[Chart]) -> str:
    """The page as HTML.

    Args:
        title: of the page.
        about: paragraphs above the table.
        table: rows of text; the first has the column titles.
        charts: one per quantity, each with the same lines in the same order.
    """
    lines = list(dict.fromkeys(name for chart in charts for name, _ in chart.over_updates))
    keys = legend((name, f"line{i}") for i, name in enumerate(lines))
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        section("Table", "".join(note(text) for text in about) + text_table(table)),
        *(section(chart.name, keys + _figures(chart, lines)) for chart in charts),
    ]
    return document(title, body, "compare", line_styles(range(len(lines))))


def line_styles(lines: Iterable[int]) -> str:
    """Style rules of lines, by their numbers; their CSS classes are ``line`` and the number."""
    rules = []
    for line in lines:
        colour, dashes = style_of(line)
        rules.append(f".curve.line{line} {{ stroke: {colour}; stroke-dasharray: {dashes or 'none'}; }}")
        rules.append(f".dot.line{line}, rect.line{line} {{ fill: {colour}; }} i.line{line} {{ background: {colour}; }}")
    return "\n".join(rules)


def _figures(chart: Chart, lines: Sequence[str]) -> str:
    parts = []
    for x_label, named_points in (("updates", chart.over_updates), ("seconds", chart.over_time)):
        curves = [Curve(name, f"line{lines.index(name)}", points, chart.dots) for name, points in named_points]
        svg = for_screens(
            lambda width, curves=curves, x_label=x_label: line_chart(curves, width, TALL, x_label, chart.name),  # type: ignore[misc]
            HALF,
        )
        parts.append(f"<div>{svg}</div>")
    return f'<div class="pair">{"".join(parts)}</div>'
