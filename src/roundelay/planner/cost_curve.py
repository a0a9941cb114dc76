"""Curves: seconds by size, as few numbers as tell them within a tolerance."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

TOLERANCE = 0.15
"""Largest relative error with which one line stands for what was measured."""

Points = Sequence[tuple[float, float]]
"""Sizes and seconds, in the order of the sizes."""

_LEAST_S = 1e-12


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, linear between points.

    Beyond its end it goes on with the last slope, but for less than at its first point, which holds before it too.

    Args:
        points: sizes (bytes or FLOPs) and seconds, in the order of the sizes.
        line_error: largest relative error of the best single line against what was measured.
        error: that of this curve.

    Raises:
        ValueError: there are no points or sizes do not ascend, or a number is negative or not finite.
    """

    points: tuple[tuple[float, float], ...]
    line_error: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        numbers = [*sizes, *(seconds for _, seconds in self.points), self.line_error, self.error]
        if not sizes or sizes != sorted(set(sizes)) or not all(0 <= number < math.inf for number in numbers):
            raise ValueError("a curve whose sizes do not ascend, or with a number that is negative or not finite")

    def __call__(self, size: float) -> float:
        """Seconds of this size."""
        return between(self.points, size)

    @staticmethod
    def fitted(measured: Iterable[tuple[float, float]], tolerance: float = TOLERANCE) -> Curve:
        """The line of measured points where it is within the tolerance; else a point for each size.

        That is the median of its seconds, or what a larger size took where that is less.

        Args:
            measured: sizes and seconds, in any order; a size may come more than once.
            tolerance: largest relative error of the line.
        """
        points = [(size, max(seconds, _LEAST_S)) for size, seconds in measured]
        latency, slope = fitted_line([(1.0, size, seconds) for size, seconds in points])
        end = max(size for size, _ in points)
        line = Curve(tuple(sorted({(0, latency), (end, latency + slope * end)})))
        line_error = _largest_error(line, points)
        if line_error <= tolerance:
            return Curve(line.points, line_error, line_error)
        of_size = defaultdict(list)
        for size, seconds in points:
            of_size[size].append(seconds)
        falling = sorted(of_size, reverse=True)
        least = accumulate((statistics.median(of_size[size]) for size in falling), min)
        kept = Curve(tuple(sorted(zip(falling, least, strict=True))))
        return Curve(kept.points, line_error, _largest_error(kept, points))


def between(points: Points, x: float) -> float:
    """What is linear between points, and goes on with the last slope, but for less than at the first."""
    first, last = points[0], points[-1]
    if x <= first[0] or len(points) == 1:
        return first[1]
    after = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    value = y1 if x == x1 else y0 + (y1 - y0) / (x1 - x0) * (x - x0)
    return max(first[1], value) if x > last[0] else value


def fitted_line(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The α and β, neither negative, by least squares of the relative errors of ``a α + b β`` against y.

    Args:
        rows: of a, b and y, which is positive.
    """
    aa, ab, bb = (sum(row[i] * row[j] / row[2] ** 2 for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(row[i] / row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    alone = (ay / aa if aa else 0.0, 0.0), (0.0, by / bb if bb else 0.0)
    return min(alone, key=lambda pair: sum(((a * pair[0] + b * pair[1]) / y - 1) ** 2 for a, b, y in rows))


def _largest_error(curve: Curve, points: Points) -> float:
    return max(abs(curve(size) - seconds) / seconds for size, seconds in points)
