"""Curves: exact at their points, monotone where these are, one line where one suffices."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.planner.cost_curve import TOLERANCE, Curve, fitted_line

SIZES = st.integers(0, 10**9)
SECONDS = st.floats(1e-9, 1e3)
POINTS = st.dictionaries(SIZES, SECONDS, min_size=1, max_size=8).map(lambda own: tuple(sorted(own.items())))
RISING = st.dictionaries(SIZES, SECONDS, min_size=2, max_size=8).map(
    lambda own: tuple(zip(sorted(own), sorted(own.values()), strict=True))
)


@given(POINTS)
def test_a_curve_is_exact_at_its_points(points):
    assert [Curve(points)(size) for size, _ in points] == [seconds for _, seconds in points]


@given(RISING, st.lists(st.floats(0, 2e9), min_size=2, max_size=10))
def test_a_curve_of_rising_points_falls_nowhere(points, sizes):
    curve = Curve(points)
    seconds = [curve(size) for size in sorted(sizes)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))


@given(POINTS, st.floats(0, 1e12))
def test_beyond_its_ends_a_curve_is_no_less_than_at_its_first_point(points, size):
    if not points[0][0] <= size <= points[-1][0]:
        assert Curve(points)(size) >= points[0][1]


def test_beyond_its_end_a_curve_goes_on_with_the_last_slope():
    curve = Curve(((10, 1.0), (20, 2.0), (30, 5.0)))
    assert curve(40) == 8.0
    assert curve(15) == 1.5
    assert curve(0) == 1.0
    assert Curve(((10, 1.0), (20, 0.5)))(100) == 1.0


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-6), st.sets(st.integers(1, 10**8), min_size=2, max_size=8))
def test_the_line_of_points_on_a_line_is_kept_alone(latency, slope, sizes):
    curve = Curve.fitted([(size, latency + slope * size) for size in sizes])
    assert len(curve.points) == 2
    assert curve.error <= TOLERANCE
    for size in sizes:
        assert curve(size) == pytest.approx(latency + slope * size, rel=TOLERANCE)


def test_a_line_is_recovered_exactly():
    curve = Curve.fitted([(size, 2e-5 + 3e-9 * size) for size in (1_000, 100_000, 10_000_000)])
    assert [size for size, _ in curve.points] == [0, 10_000_000]
    assert curve(0) == pytest.approx(2e-5, rel=1e-9)
    assert curve(10_000_000) == pytest.approx(2e-5 + 3e-2, rel=1e-9)


def test_points_that_are_on_no_line_are_kept_by_their_medians_with_both_errors():
    measured = [(100, 1e-5), (1_000, 1.2e-5), (10_000, 3e-5), (1_000_000, 2e-3), (1_000_000, 2.2e-3), (1_000_000, 3e-3)]
    curve = Curve.fitted(measured)
    assert curve.points == ((100, 1e-5), (1_000, 1.2e-5), (10_000, 3e-5), (1_000_000, 2.2e-3))
    assert curve.line_error > TOLERANCE
    assert curve.error == pytest.approx(0.8 / 3)


def test_no_line_has_a_negative_latency_or_slope():
    assert fitted_line([(1.0, 10.0, 1e-4), (1.0, 100.0, 1e-2)])[0] == 0.0
    assert fitted_line([(1.0, 10.0, 1e-2), (1.0, 100.0, 1e-4)])[1] == 0.0


@pytest.mark.parametrize(
    ("points", "errors"),
    [
        ((), (0, 0)),
        (((1, 2.0), (1, 3.0)), (0, 0)),
        (((2, 1.0), (1, 3.0)), (0, 0)),
        (((1, math.nan),), (0, 0)),
        (((1, math.inf),), (0, 0)),
        (((1, -1.0),), (0, 0)),
        (((-1, 1.0),), (0, 0)),
        (((1, 2.0),), (-1, 0)),
        (((1, 2.0),), (0, math.nan)),
    ],
)
def test_what_is_no_curve_is_refused(points, errors):
    with pytest.raises(ValueError, match="a curve"):
        Curve(points, *errors)


def test_noise_makes_no_size_dearer_than_a_larger_one():
    curve = Curve.fitted([(100, 5e-4), (1_000, 2e-4), (10_000, 3e-4), (1_000_000, 2e-3)])
    assert curve.points == ((100, 2e-4), (1_000, 2e-4), (10_000, 3e-4), (1_000_000, 2e-3))
