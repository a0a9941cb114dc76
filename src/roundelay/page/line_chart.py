"""Line charts as inline SVG; long curves are thinned to keep the page small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from roundelay.page.scale import Axis, fit_axis, short, ticks

MOST_POINTS = 1400
LEFT, RIGHT, TOP, BOTTOM = 54.0, 14.0, 10.0, 38.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve.

    Args:
        name: its name in the legend.
        css_class: gives the colour.
        points: (x, y) by increasing x; a y that is not finite is a gap.
        dots: show each point as a dot.
    """

    name: str
    css_class: str
    points: Points
    dots: bool = False


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most ``most`` of the points: the lowest and the highest of every interval, so that no peak is lost."""
    if len(points) <= most:
        return points
    buckets = max(1, most // 2)
    kept: list[tuple[float, float]] = []
    for i in range(buckets):
        part = points[i * len(points) // buckets : (i + 1) * len(points) // buckets]
        finite = [p for p in part if math.isfinite(p[1])] or part[:1]
        kept += sorted({min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])})
    return kept


def smoothed(points: Points, reach: int) -> Points:
    """The centred running mean over ``reach`` points to either side; over fewer near the ends, equal on both sides."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    sums = [0.0, *accumulate(y for _, y in finite)]
    means = []
    for i, (x, _) in enumerate(finite):
        side = min(reach, i, len(finite) - 1 - i)
        means.append((x, (sums[i + side + 1] - sums[i - side]) / (2 * side + 1)))
    return means


def line_chart(
    curves: Sequence[Curve], width: int, height: int, x_label: str, y_label: str, *, zero: bool = False
) -> str:
    """Draw curves as an ``svg`` element.

    Args:
        curves: in drawing order.
        width: in pixels.
        height: in pixels.
        x_label: shown below the axis.
        y_label: for screen readers, and shown at the cursor.
        zero: start the vertical axis at 0.
    """
    ys = [y for curve in curves for _, y in curve.points]
    xs = [x for curve in curves for x, _ in curve.points]
    bottom = height - BOTTOM
    across = fit_axis(xs, LEFT, width - RIGHT, zero=not xs or min(xs) <= max(xs) / 2)
    across = Axis(across.low, max(xs, default=across.high), across.start, across.end) if len(set(xs)) > 1 else across
    up = fit_axis(ys, bottom, TOP, may_log=not zero, zero=zero)
    parts = [
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y_label)} over '
        f'{escape(x_label)}" data-x="{across.low},{across.high},{across.start},{across.end}" '
        f'data-y="{up.low},{up.high},{up.start},{up.end},{int(up.log)}" data-name="{escape(x_label)}">',
        *_grid(across, up, width, height, x_label),
        *(_curve(curve, across, up, width) for curve in curves),
        "</svg>",
    ]
    return "".join(parts)


def _grid(across: Axis, up: Axis, width: int, height: int, x_label: str) -> list[str]:
    bottom = height - BOTTOM
    parts = []
    for value in ticks(up, max(4, int((bottom - TOP) / 30))):
        y = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{width - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in ticks(across, max(4, int(width / 60))):
        x = across.place(value)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:g}" y2="{bottom + 4:g}"/>')
        anchor = "end" if x > width - RIGHT - 12 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17:g}" text-anchor="{anchor}">{short(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT:g}" x2="{width - RIGHT:g}" y1="{bottom:g}" y2="{bottom:g}"/>')
    middle = (LEFT + width - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle:g}" y="{height - 5:g}" text-anchor="middle">{escape(x_label)}</text>')
    return parts


def _curve(curve: Curve, across: Axis, up: Axis, width: int) -> str:
    points = thinned(curve.points, min(MOST_POINTS, 2 * width))
    pixels = [(across.place(x), up.place(y)) if _has_place(y, up) else None for x, y in points]
    steps, pen = [], "M"
    for pixel in pixels:
        steps.append(f"{pen}{pixel[0]:.1f} {pixel[1]:.1f}" if pixel else "")
        pen = "L" if pixel else "M"
    path = f'<path class="curve {curve.css_class}" data-name="{escape(curve.name)}" d="{"".join(steps)}"/>'
    if not curve.dots and len(pixels) > 1:
        return path
    radius = 3.2 if len(pixels) <= 80 else 1.6
    dots = [
        f'<circle class="dot {curve.css_class}" cx="{pixel[0]:.1f}" cy="{pixel[1]:.1f}" r="{radius}">'
        f"<title>{escape(curve.name)} {short(y)} at {short(x)}</title></circle>"
        for pixel, (x, y) in zip(pixels, points, strict=True)
        if pixel
    ]
    return path + "".join(dots)


def _has_place(y: float, up: Axis) -> bool:
    return math.isfinite(y) and (y > 0 or not up.log)
