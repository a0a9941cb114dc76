"""Schedules keep the laws that the update rules are built on, whatever the sizes.

U(k, g) is the number of updates done when stage k runs the forward of micro-batch g; the lag of stage k is D-1-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.action import Action
from roundelay.schedules import SCHEDULES, Body, Schedule, actions, schedule_named
from tests.lower.plans import FEW

GPIPE, ONE_F_ONE_B, ASYNC = SCHEDULES["gpipe"], SCHEDULES["1f1b"], SCHEDULES["async-1f1b"]
EVERY = st.sampled_from([schedule for schedule in SCHEDULES.values() if schedule.stages_per_worker == 1])
ZERO = SCHEDULES["zb-h1"]
FLUSHING = st.sampled_from([GPIPE, ONE_F_ONE_B, ZERO])

STAGES = st.integers(1, 8).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size)))
COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def row(text: str) -> list[str]:
    """The kinds and numbers of a row of actions."""
    return text.split()


def printed(acts: Sequence[Action]) -> list[str]:
    """As ``F0 B0``, without the stage."""
    return [f"{act.kind}{act.number}" for act in acts]


def updates_before(acts: Sequence[Action], kind: str) -> list[int]:
    """Updates done before the forward (or backward) of micro-batch 0, 1, ..."""
    done, seen = 0, []
    for act in acts:
        done += act.kind == "U"
        if act.kind == kind:
            seen.append(done)
    return seen


@pytest.mark.parametrize(
    ("name", "stage", "expected"),
    [
        ("gpipe", 0, "F0 F1 F2 F3 B0 B1 B2 B3 U0"),
        ("gpipe", 2, "F0 F1 F2 F3 B0 B1 B2 B3 U0"),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 B2 B3 U0"),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 B3 U0"),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3 U0"),
        ("zb-h1", 0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 U0"),
        ("zb-h1", 1, "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 U0"),
        ("zb-h1", 2, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 U0"),
    ],
)
def test_one_batch_of_four_on_three_stages(name: str, stage: int, expected: str) -> None:
    assert printed(actions(schedule_named(name), [stage], 3, [4])) == row(expected)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 B3 U3 B4 U4"),
        (1, "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 B4 U4"),
        (2, "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4"),
    ],
)
def test_five_micro_batches_asynchronously_on_three_stages(stage: int, expected: str) -> None:
    assert printed(actions(ASYNC, [stage], 3, [1] * 5)) == row(expected)


@FEW
@given(EVERY, STAGES, COUNTS)
def test_every_stage_does_everything_once_and_in_order(
    schedule: Schedule, place: tuple[int, int], counts: list[int]
) -> None:
    acts = actions(schedule, [place[0]], place[1], counts)
    total = sum(counts)
    for kind, size in (("F", total), ("B", total), ("W", total * schedule.halved), ("U", len(counts))):
        assert [act.number for act in acts if act.kind == kind] == list(range(size))
    assert {act.stage for act in acts} == {place[0]}
    order = {(act.kind, act.number): i for i, act in enumerate(acts)}
    assert all(order["F", g] < order["B", g] for g in range(total))
    assert not schedule.halved or all(order["B", g] < order["W", g] for g in range(total))


@FEW
@given(EVERY, STAGES, COUNTS)
def test_the_update_follows_the_last_backward_of_its_batch_at_once(
    schedule: Schedule, place: tuple[int, int], counts: list[int]
) -> None:
    acts = printed(actions(schedule, [place[0]], place[1], counts))
    lasts = [end - 1 for end in accumulate(counts)]
    kind = "W" if schedule.halved else "B"
    assert [acts[acts.index(f"U{t}") - 1] for t in range(len(counts))] == [f"{kind}{g}" for g in lasts]


@FEW
@given(STAGES, st.integers(1, 6), st.integers(1, 8))
def test_async_forwards_and_backwards_see_the_updates_of_the_closed_forms(
    place: tuple[int, int], micro_batches: int, batches: int
) -> None:
    lag = place[1] - 1 - place[0]
    acts = actions(ASYNC, [place[0]], place[1], [micro_batches] * batches)
    total = micro_batches * batches
    assert updates_before(acts, "F") == [max(0, g - lag) // micro_batches for g in range(total)]
    assert updates_before(acts, "B") == [g // micro_batches for g in range(total)]


@FEW
@given(STAGES, COUNTS)
def test_async_updates_are_counted_in_batches_that_ended_a_lag_ago(place: tuple[int, int], counts: list[int]) -> None:
    lag = place[1] - 1 - place[0]
    ends = list(accumulate(counts))
    acts = actions(ASYNC, [place[0]], place[1], counts)
    assert updates_before(acts, "F") == [sum(end <= g - lag for end in ends) for g in range(sum(counts))]
    assert updates_before(acts, "B") == [sum(end <= g for end in ends) for g in range(sum(counts))]


@FEW
@given(STAGES, st.integers(1, 6), st.integers(1, 8))
def test_async_backwards_run_behind_by_the_lag_over_the_batch_s_size_rounded_up_or_down(
    place: tuple[int, int], micro_batches: int, batches: int
) -> None:
    lag = place[1] - 1 - place[0]
    acts = actions(ASYNC, [place[0]], place[1], [micro_batches] * batches)
    crossed = [b - f for f, b in zip(updates_before(acts, "F"), updates_before(acts, "B"), strict=True)]
    assert set(crossed[lag:]) <= {lag // micro_batches, -(-lag // micro_batches)}
    assert max(crossed, default=0) <= -(-lag // micro_batches)
    if micro_batches == 1:
        assert crossed == [min(g, lag) for g in range(batches)]


@FEW
@given(FLUSHING, STAGES, COUNTS)
def test_flushing_schedules_read_the_version_of_their_batch_in_both_passes(
    schedule: Schedule, place: tuple[int, int], counts: list[int]
) -> None:
    acts = actions(schedule, [place[0]], place[1], counts)
    batch = [t for t, count in enumerate(counts) for _ in range(count)]
    assert updates_before(acts, "F") == batch
    assert updates_before(acts, "B") == batch


@FEW
@given(STAGES, COUNTS)
def test_gpipe_runs_every_forward_of_a_batch_before_its_first_backward(
    place: tuple[int, int], counts: list[int]
) -> None:
    acts = printed(actions(GPIPE, [place[0]], place[1], counts))
    start = 0
    for t, count in enumerate(counts):
        numbers = range(start, start + count)
        expected = [f"F{g}" for g in numbers] + [f"B{g}" for g in numbers] + [f"U{t}"]
        assert acts[: len(expected)] == expected
        acts, start = acts[len(expected) :], start + count
    assert acts == []


def in_flight_peak(acts: Sequence[Action]) -> int:
    """Most micro-batches that are forward but not yet backward."""
    return max(accumulate({"F": 1, "B": -1}.get(act.kind, 0) for act in acts))


@FEW
@given(st.sampled_from([ONE_F_ONE_B, ZERO, ASYNC]), STAGES, COUNTS)
def test_one_f_one_b_keeps_at_most_d_minus_k_in_flight(
    schedule: Schedule, place: tuple[int, int], counts: list[int]
) -> None:
    window = sum(counts) if schedule is ASYNC else max(counts)
    assert in_flight_peak(actions(schedule, [place[0]], place[1], counts)) == min(place[1] - place[0], window)


@FEW
@given(STAGES, COUNTS)
def test_two_halves_hold_no_more_micro_batches_on_any_stage_than_stage_0_of_1f1b(
    place: tuple[int, int], counts: list[int]
) -> None:
    """Counted are those that are forward and whose weights' half is still to come."""
    acts = actions(ZERO, [place[0]], place[1], counts)
    held = max(accumulate({"F": 1, "W": -1}.get(act.kind, 0) for act in acts))
    assert held == min(place[1], max(counts))


@FEW
@given(STAGES, COUNTS)
def test_gpipe_keeps_a_whole_batch_in_flight(place: tuple[int, int], counts: list[int]) -> None:
    assert in_flight_peak(actions(GPIPE, [place[0]], place[1], counts)) == max(counts)


@FEW
@given(EVERY, st.integers(1, 6), COUNTS)
def test_the_orders_of_all_stages_fit_together(schedule: Schedule, num_stages: int, counts: list[int]) -> None:
    """Executed together, with each action waiting for what it needs from its neighbours, they come to an end."""
    rows = [actions(schedule, [k], num_stages, counts) for k in range(num_stages)]
    at, done, moved = [0] * num_stages, set(), True
    while moved:
        moved = False
        for k, acts in enumerate(rows):
            while at[k] < len(acts):
                act = acts[at[k]]
                need = {"F": (k - 1, "F", act.number), "B": (k + 1, "B", act.number)}.get(act.kind)
                if need is not None and 0 <= need[0] < num_stages and need not in done:
                    break
                done.add((k, act.kind, act.number))
                at[k], moved = at[k] + 1, True
    assert at == [len(acts) for acts in rows]


@FEW
@given(EVERY, STAGES)
def test_no_data_no_actions(schedule: Schedule, place: tuple[int, int]) -> None:
    assert actions(schedule, [place[0]], place[1], []) == []


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"'2f2b'.*gpipe, 1f1b, async-1f1b, free, interleaved-1f1b, zb-h1, zb-v"):
        schedule_named("2f2b")


@pytest.mark.parametrize(("offsets", "last"), [((0, -1), {1}), ((-1, 0), {0}), ((0, 0), {1})])
def test_the_last_of_all_stages_is_the_line_of_the_latest_turn_and_then_of_the_body(
    offsets: tuple[int, int], last: set[int]
) -> None:
    body = Body(1, tuple(Action(stage, "B", offset) for stage, offset in enumerate(offsets)))
    assert body.last_of_all("B") == last
