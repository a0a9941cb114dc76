"""Curves keep their peaks when they are thinned, and do not lag when they are smoothed."""

from __future__ import annotations

import math
import re

from roundelay.page.line_chart import MOST_POINTS, Curve, line_chart, smoothed, thinned


def test_thinning_keeps_the_peaks_and_the_order() -> None:
    points = [(float(i), 100.0 if i == 4711 else -100.0 if i == 7007 else math.sin(i)) for i in range(50_000)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert {(4711.0, 100.0), (7007.0, -100.0)} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_few_points_stay_as_they_are() -> None:
    points = [(0.0, 1.0), (1.0, math.nan)]
    assert thinned(points) == points


def test_a_moving_average_keeps_lines_as_they_are_up_to_their_ends() -> None:
    assert [y for _, y in smoothed([(float(i), 2.5 * i) for i in range(9)], 3)] == [2.5 * i for i in range(9)]


def test_a_moving_average_takes_as_many_from_both_sides_and_passes_over_gaps() -> None:
    points = [(0.0, 0.0), (1.0, math.nan), (2.0, 4.0), (3.0, 11.0), (4.0, 3.0), (5.0, 7.0)]
    assert smoothed(points, 1) == [(0.0, 0.0), (2.0, 5.0), (3.0, 6.0), (4.0, 7.0), (5.0, 7.0)]
    assert smoothed(points, 9) == [(0.0, 0.0), (2.0, 5.0), (3.0, 5.0), (4.0, 7.0), (5.0, 7.0)]


def test_a_gap_lifts_the_pen() -> None:
    drawn = line_chart([Curve("loss", "a", [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0)])], 400, 200, "update", "loss")
    (path,) = re.findall(r' d="([^"]*)"', drawn)
    assert re.sub(r"[\d. ]+", "", path) == "MLM"


def test_names_are_escaped() -> None:
    drawn = line_chart([Curve('<b>"', "a", [(0, 1.0)], dots=True)], 400, 200, "<x>", "<y>")
    assert "<b>" not in drawn
    assert "<x>" not in drawn
    assert "<y>" not in drawn
