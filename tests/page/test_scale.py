"""Axes hold every value; ticks are round, inside, in order and not too many; labels are short."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.page.scale import Axis, fit_axis, seconds, short, size, ticks

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)


def test_a_place_is_proportional_or_logarithmic() -> None:
    assert Axis(0.0, 10.0, 100.0, 200.0).place(2.5) == 125.0
    assert Axis(0.0, 10.0, 200.0, 100.0).place(10.0) == 100.0
    assert Axis(1.0, 100.0, 0.0, 50.0, log=True).place(10.0) == pytest.approx(25.0)


@given(st.lists(NUMBERS, max_size=8), st.booleans(), st.integers(2, 12))
def test_whatever_is_to_be_shown_has_room_and_ticks(values: list[float], zero: bool, most: int) -> None:
    axis = fit_axis([*values, math.nan, math.inf], 0.0, 300.0, may_log=not zero, zero=zero)
    for value in values:
        assert -0.001 <= axis.place(value) <= 300.001
    found = ticks(axis, most)
    assert len(found) <= most
    assert found == sorted(found)
    assert all(-0.001 <= axis.place(value) <= 300.001 for value in found)


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.1, 17.0, [5.0, 10.0, 15.0]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0.0, 1400.0, [0.0, 500.0, 1000.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert ticks(Axis(low, high, 0.0, 1.0), 6) == pytest.approx(found)


def test_values_over_decades_get_a_logarithmic_axis_with_powers_of_ten() -> None:
    axis = fit_axis([0.001, 1000.0], 0.0, 100.0, may_log=True)
    assert axis.log
    assert ticks(axis, 8) == pytest.approx([0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0])
    assert not fit_axis([0.0, 1000.0], 0.0, 100.0, may_log=True).log


def test_numbers_are_told_briefly() -> None:
    values = [0.0, 0.25, 1234.0, 12345.678, 2.3039, 1e-7, 1e6, -3.0, math.nan]
    told = ["0", "0.25", "1,234", "12,346", "2.304", "1e-7", "1e6", "-3", "-"]
    assert [short(value) for value in values] == told
    assert [seconds(value) for value in (0.0123, 5.0, 150.0, 9000.0)] == ["12.3 ms", "5 s", "2 min 30 s", "2 h 30 min"]
    assert [size(value) for value in (12, 5.0e4, 6.48e6, 3.93e8, 2e9)] == ["12 B", "50 kB", "6.48 MB", "393 MB", "2 GB"]
