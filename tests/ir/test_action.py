"""Actions and their staircase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import UsageError
from roundelay.ir.action import Action, grid
from tests.ir.garbled import garbled

ACTIONS = st.builds(Action, st.integers(0, 10**6), st.sampled_from(["F", "B", "U"]), st.integers(0, 10**12))


@given(ACTIONS)
def test_an_action_is_read_as_it_is_printed(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_an_action_prints_stage_kind_and_number() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("13U7") == Action(stage=13, kind="U", number=7)


@given(st.text(max_size=12) | ACTIONS.flatmap(lambda action: garbled(str(action))))
def test_a_text_is_an_action_that_prints_so_or_is_refused(text: str) -> None:
    try:
        action = Action.parse(text)
    except UsageError:
        return
    assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2f0", "2V0", "-2F0", "2F-1", "2F0 ", " 2F0", "2F0\n", "2 F 0", "2F0B1", "1.0F0"]
)
def test_what_is_no_action_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Action.parse(text)
    assert refusal.value.got == repr(text)


@pytest.mark.parametrize("text", ["02F0", "2F00", "٢F٠"])
def test_a_number_in_another_writing_is_no_action(text: str) -> None:
    with pytest.raises(UsageError):
        Action.parse(text)


def test_a_number_too_long_to_read_is_refused_as_any_other_text() -> None:
    with pytest.raises(UsageError):
        Action.parse("2F" + "9" * 5000)


def test_the_grid_is_a_staircase_with_a_dot_where_a_stage_waits() -> None:
    columns = {1: ["", "F0", "B0"], 0: ["F0", "F1", "", "B0"]}
    assert grid(columns, 4).splitlines() == ["stage 0 |F0 F1 ·  B0", "stage 1 |·  F0 B0 ·"]


def test_the_grid_s_columns_stand_in_line_from_ten_stages_on() -> None:
    rows = grid({k: [""] * k + [f"F{k}"] for k in range(12)}, 12).splitlines()
    assert len({row.index("|") for row in rows}) == 1
    assert [row.index(f"F{k}") for k, row in enumerate(rows)] == sorted(
        {row.index(f"F{k}") for k, row in enumerate(rows)}
    )


def test_an_empty_grid_has_rows_of_dots() -> None:
    assert grid({0: [], 1: []}, 3).splitlines() == ["stage 0 |· · ·", "stage 1 |· · ·"]
