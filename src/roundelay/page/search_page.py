"""The HTML page of a table, and of what searches have found after how many evaluations, over several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from roundelay.page.comparison_page import COLOURS, line_styles
from roundelay.page.line_chart import Curve, Points, line_chart
from roundelay.page.sections import TALL, WIDE, document, for_screens, legend, note, section, text_table


@dataclass(frozen=True, slots=True)
class Spread:
    """What the runs of one search have found: median and interval, by x."""

    name: str
    low: Points
    median: Points
    high: Points


@dataclass(frozen=True, slots=True)
class SearchChart:
    """One figure: its title, the names of its axes, and a spread for each search."""

    title: str
    x_label: str
    y_label: str
    spreads: Sequence[Spread]


def search_page(
    title: str, about: Sequence[str], table: Sequence[Sequence[str]], charts: Sequence[SearchChart] = ()
) -> str:
    """The page as HTML; a median is drawn solid, the ends of its interval dashed.

    Args:
        title: of the page.
        about: paragraphs below the table.
        table: rows of text; the first has the column titles.
        charts: each with the same searches in the same order.
    """
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        *(section(chart.title, _figure(chart)) for chart in charts),
        section("Table", text_table(table) + "".join(note(text) for text in about)),
    ]
    lines = range(max((len(chart.spreads) for chart in charts), default=0))
    return document(title, body, "table", line_styles([*lines, *(_dashed(line) for line in lines)]))


def _figure(chart: SearchChart) -> str:
    keys = legend((spread.name, f"line{line}") for line, spread in enumerate(chart.spreads))
    curves = [curve for line, spread in enumerate(chart.spreads) for curve in _curves(line, spread)]
    return keys + for_screens(lambda width: line_chart(curves, width, TALL, chart.x_label, chart.y_label), WIDE)


def _curves(line: int, spread: Spread) -> list[Curve]:
    ends = {"low": spread.low, "high": spread.high}
    dashed = [Curve(f"{spread.name}, {end}", f"line{_dashed(line)}", points) for end, points in ends.items()]
    return [Curve(spread.name, f"line{line}", spread.median), *dashed]


def _dashed(line: int) -> int:
    """The line of the same colour that is dashed."""
    return line + len(COLOURS)
