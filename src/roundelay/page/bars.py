"""Stacked horizontal bars as inline SVG, one group of bars per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from roundelay.page.scale import Axis, labelled_grid

LEFT, RIGHT, TOP, BOTTOM = 84.0, 18.0, 4.0, 24.0
THICK, BETWEEN, GROUP = 16.0, 3.0, 12.0


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar.

    Args:
        name: shown when the cursor points at it.
        css_class: gives the colour.
        value: its length, in units of the axis.
    """

    name: str
    css_class: str
    value: float


@dataclass(frozen=True, slots=True)
class Group:
    """The bars of one worker, from top to bottom.

    Args:
        name: shown to their left.
        bars: each a sequence of parts.
    """

    name: str
    bars: Sequence[Sequence[BarPart]]


def bars(groups: Sequence[Group], width: int, most: float, as_text: Callable[[float], str], label: str) -> str:
    """Draw groups of bars as an ``svg`` element.

    Args:
        groups: from top to bottom.
        width: in pixels.
        most: value at the axis's end.
        as_text: formats a value.
        label: what the figure shows, for screen readers.
    """
    across = Axis(0.0, most if most > 0 else 1.0, LEFT, width - RIGHT)
    parts: list[str] = []
    y = TOP
    for group in groups:
        tall = len(group.bars) * (THICK + BETWEEN) - BETWEEN
        parts.append(f'<text class="row" x="0" y="{y + tall / 2 + 4:.1f}">{escape(group.name)}</text>')
        for bar in group.bars:
            parts += _bar(bar, across, y, as_text)
            y += THICK + BETWEEN
        y += GROUP - BETWEEN
    bottom = y - GROUP + 6
    head = f'<svg class="bars" viewBox="0 0 {width} {bottom + BOTTOM:g}" role="img" aria-label="{escape(label)}">'
    grid = labelled_grid(across, max(4, int(width / 110)), bottom, bottom + 16, as_text)
    return "".join([head, *grid, *parts, "</svg>"])


def _bar(bar: Sequence[BarPart], across: Axis, y: float, as_text: Callable[[float], str]) -> list[str]:
    elements, at = [], 0.0
    for part in bar:
        if part.value <= 0:
            continue
        x, length = across.place(at), across.place(at + part.value) - across.place(at)
        text = as_text(part.value)
        elements.append(
            f'<rect class="{part.css_class}" x="{x:.2f}" y="{y:.1f}" width="{max(0.0, length - 0.6):.2f}" '
            f'height="{THICK:g}" rx="2"><title>{escape(part.name)}: {escape(text)}</title></rect>'
        )
        if length > 7 * len(text) + 8:
            elements.append(
                f'<text class="inside {part.css_class}" x="{x + length / 2:.1f}" y="{y + THICK - 4.4:.1f}" '
                f'text-anchor="middle">{escape(text)}</text>'
            )
        at += part.value
    return elements
