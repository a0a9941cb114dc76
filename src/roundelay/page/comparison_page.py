"""A comparison as one HTML page: its table, and every line's curves over updates and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from roundelay.page.line_chart import Curve, Points, figure
from roundelay.page.run_page import POLICY
from roundelay.page.sections import HALF, TALL, each, legend, note, section
from roundelay.page.style import SCRIPT, STYLE

COLOURS = (
    "#3f76a8", "#cf7468", "#55915a", "#a27bb5", "#c8973c", "#4aa3a2",
    "#8c6d4f", "#d07ba6", "#7f8b2e", "#6672c4", "#7d8790", "#b0512f",
)  # fmt: skip
"""Of the first lines; later ones begin anew, dashed."""

DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, slots=True)
class Chart:
    """One quantity.

    Args:
        name: what it is.
        over_updates: line to its points (updates, value).
        over_time: line to its points (seconds, value).
        dots: show each point as a dot.
    """

    name: str
    over_updates: Sequence[tuple[str, Points]]
    over_time: Sequence[tuple[str, Points]]
    dots: bool = False


def style_of(line: int) -> tuple[str, str]:
    """Colour and dashes of a line, by its number."""
    return COLOURS[line % len(COLOURS)], DASHES[line // len(COLOURS) % len(DASHES)]


def comparison_page(title: str, about: Sequence[str], table: Sequence[Sequence[str]], charts: Sequence[Chart]) -> str:
    """The page.

    Args:
        title: of the page.
        about: paragraphs below it.
        table: rows of text, the titles first.
        charts: with the same lines in the same order each.
    """
    lines = list(dict.fromkeys(name for chart in charts for name, _ in chart.over_updates))
    keys = legend((name, f"line{i}") for i, name in enumerate(lines))
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        section("Table", "".join(note(text) for text in about) + _table(table)),
        *(section(chart.name, keys + _figures(chart, lines)) for chart in charts),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}{_looks(len(lines))}</style></head>\n<body><main>{''.join(body)}<footer>Written by roundelay "
        f"compare; this file needs nothing but itself.</footer></main><script>{SCRIPT}</script></body></html>\n"
    )


def _looks(count: int) -> str:
    made = []
    for line in range(count):
        colour, dashes = style_of(line)
        made.append(f".curve.line{line} {{ stroke: {colour}; stroke-dasharray: {dashes or 'none'}; }}")
        made.append(f".dot.line{line} {{ fill: {colour}; }} i.line{line} {{ background: {colour}; }}")
    return "\n".join(made)


def _figures(chart: Chart, lines: Sequence[str]) -> str:
    parts = []
    for x_label, made in (("updates", chart.over_updates), ("seconds", chart.over_time)):
        curves = [Curve(name, f"line{lines.index(name)}", points, chart.dots) for name, points in made]
        drawn = each(
            lambda width, curves=curves, x_label=x_label: figure(curves, width, TALL, x_label, chart.name),  # type: ignore[misc]
            HALF,
        )
        parts.append(f"<div>{drawn}</div>")
    return f'<div class="pair">{"".join(parts)}</div>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
