"""The picture of Figure 4: activation memory of a worker over a step, for data parallelism and staggered workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from benchmarks.cdp.figure_4_memory import Memory
from roundelay.page.line_chart import Curve, Points, line_chart, thinned
from roundelay.page.style import STYLE

WIDTH, HEIGHT, TITLE, LEGEND = 520, 250, 26, 30
MOST_POINTS = 400
COLOURS = ("a", "b", "c", "d")
IDEAL = "half"

Panel = tuple[str, Mapping[str, Memory]]
"""A title, and curves by name; the first is that of data parallelism."""


def _steps(memory: Memory) -> Points:
    """Points of a line with steps: shares of a period, and MB."""
    points = [(time / memory.period_s, held / 1e6) for time, held in memory.points]
    line: list[tuple[float, float]] = []
    for share, held in points:
        line += [(share, line[-1][1] if line else held), (share, held)]
    return thinned([*line, (1.0, line[-1][1])], MOST_POINTS)


def _drawn(panel: Panel, x: float, y: float) -> str:
    title, memories = panel
    curves = [Curve(name, colour, _steps(own)) for colour, (name, own) in zip(COLOURS, memories.items(), strict=False)]
    half = next(iter(memories.values())).peak / 2e6
    curves.append(Curve(IDEAL, "thin", [(0.0, half), (1.0, half)]))
    chart = line_chart(curves, WIDTH, HEIGHT, "share of a step", "MB of activations per image", zero=True)
    inside = re.sub("^<svg[^>]*>|</svg>$", "", chart)
    heading = f'<text x="8" y="16" style="font-weight:600">{title}</text>'
    return f'<g transform="translate({x:g} {y:g})">{heading}<g transform="translate(0 {TITLE})">{inside}</g></g>'


def picture(panels: Sequence[Panel]) -> str:
    """Panels in rows of two, as one SVG document that follows the reader's light or dark theme."""
    rows = -(-len(panels) // 2)
    width, height = 2 * WIDTH, rows * (HEIGHT + TITLE) + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" style="fill: var(--card)"/>',
        *(_drawn(panel, WIDTH * (i % 2), (HEIGHT + TITLE) * (i // 2)) for i, panel in enumerate(panels)),
    ]
    names = [*panels[0][1], f"{IDEAL} of data parallelism"]
    for place, (name, colour) in enumerate(zip(names, (*COLOURS[: len(names) - 1], "thin"), strict=True)):
        x, y = 54 + 190 * place, height - LEGEND / 2
        parts.append(f'<path class="curve {colour}" d="M{x} {y:g}h24"/><text x="{x + 30}" y="{y + 4:g}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
