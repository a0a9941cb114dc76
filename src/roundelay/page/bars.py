"""Horizontal bars made of parts, one group of bars per worker, as inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from roundelay.page.scale import Axis, ticks

LEFT, RIGHT, TOP, BOTTOM = 84.0, 18.0, 4.0, 24.0
THICK, BETWEEN, GROUP = 16.0, 3.0, 12.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar.

    Args:
        name: what it is.
        look: its CSS class, which gives the colour.
        value: its length.
    """

    name: str
    look: str
    value: float


@dataclass(frozen=True, slots=True)
class Group:
    """The bars of one worker, one below the other.

    Args:
        name: at their left.
        bars: each a row of parts.
    """

    name: str
    bars: Sequence[Sequence[Part]]


def bars(groups: Sequence[Group], width: int, most: float, told: Callable[[float], str], label: str) -> str:
    """Groups of bars as an ``svg`` element.

    Args:
        groups: from top to bottom.
        width: in pixels.
        most: value at the axis's end.
        told: a value as text.
        label: what the figure shows, for those who cannot see it.
    """
    across = Axis(0.0, most if most > 0 else 1.0, LEFT, width - RIGHT)
    parts: list[str] = []
    y = TOP
    for group in groups:
        tall = len(group.bars) * (THICK + BETWEEN) - BETWEEN
        parts.append(f'<text class="row" x="0" y="{y + tall / 2 + 4:.1f}">{escape(group.name)}</text>')
        for bar in group.bars:
            parts += _bar(bar, across, y, told)
            y += THICK + BETWEEN
        y += GROUP - BETWEEN
    bottom = y - GROUP + 6
    head = f'<svg class="bars" viewBox="0 0 {width} {bottom + BOTTOM:g}" role="img" aria-label="{escape(label)}">'
    return "".join([head, *_axis(across, bottom, width, told), *parts, "</svg>"])


def _bar(bar: Sequence[Part], across: Axis, y: float, told: Callable[[float], str]) -> list[str]:
    made, at = [], 0.0
    for part in bar:
        if part.value <= 0:
            continue
        x, length = across.place(at), across.place(at + part.value) - across.place(at)
        text = told(part.value)
        made.append(
            f'<rect class="{part.look}" x="{x:.2f}" y="{y:.1f}" width="{max(0.0, length - 0.6):.2f}" '
            f'height="{THICK:g}" rx="2"><title>{escape(part.name)}: {escape(text)}</title></rect>'
        )
        if length > 7 * len(text) + 8:
            made.append(
                f'<text class="inside {part.look}" x="{x + length / 2:.1f}" y="{y + THICK - 4.4:.1f}" '
                f'text-anchor="middle">{escape(text)}</text>'
            )
        at += part.value
    return made


def _axis(across: Axis, bottom: float, width: int, told: Callable[[float], str]) -> list[str]:
    made = []
    for value in ticks(across, max(4, int(width / 110))):
        x = across.place(value)
        made.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom:g}"/>')
        anchor = "end" if x > width - RIGHT - 10 else "middle"
        made.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16:g}" text-anchor="{anchor}">{escape(told(value))}</text>'
        )
    return made
