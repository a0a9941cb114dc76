"""What a run without an order must hold to: each violation is told by its stage and micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from roundelay.errors import PlanError
from roundelay.lower.reading import read
from roundelay.lower.verify_free import check_free_run
from roundelay.lower.verify_schedule import Fired
from tests.lower.plans import plan_of

COUNTS = [2, 1]
"""Two batches: of micro-batches 0 and 1, and of 2."""

FIRST = "F0 F1 B0 F2/0 B1 U0 B2 U1"
LAST = "F0 B0 F1 B1 U0 F2/1 B2 U1"


def fired(text: str, stage: int) -> list[Fired]:
    """``F2/1``: the forward of micro-batch 2 reads version 1; ``U0``: an update of version 0."""
    opcodes = {"F": "forward", "B": "backward", "U": "update"}
    found = []
    for word in text.split():
        number, _, reads = word[1:].partition("/")
        version = int(number) if word[0] == "U" else 0
        found.append(Fired(opcodes[word[0]], int(number), version, int(reads or 0), 0, 0, stage))
    return found


def check(first: str = FIRST, last: str = LAST, in_flight: Sequence[int] = (3, 1)) -> None:
    """Check a run of two stages."""
    plan = plan_of("ravnest", 2, 2)
    stages = [replace(stage, in_flight=count) for stage, count in zip(plan.stages, in_flight, strict=True)]
    reading = read(replace(plan, stages=tuple(stages)))
    check_free_run(reading, COUNTS, [fired(first, 0), fired(last, 1)])


def test_what_holds_passes_in_more_than_one_order() -> None:
    check()
    check(first=LAST)
    check(first="F0 F1 F2 B0 B1 U0 B2 U1")
    check(first="F0 F1 B0 B1 U0 F2/1 B2 U1", in_flight=(2, 1))


@pytest.mark.parametrize(
    ("first", "place", "why"),
    [
        ("F1 F0 B0 B1 U0 F2/1 B2 U1", "stage 0, forward of micro-batch 1", "expected 0, the next one of its stage"),
        ("F0 F1 B1 B0 U0 F2/1 B2 U1", "stage 0, backward of micro-batch 1", "expected 0, the next one of its stage"),
        ("F0 B0 B1 F1 U0 F2/1 B2 U1", "stage 0, backward of micro-batch 1", "no forward of it before"),
        ("F0 F1 B0 B1 F2 U0 B2 U1", "stage 0, forward of micro-batch 2", "whether an update is due"),
        ("F0 F1 B0 U0 B1 F2/1 B2 U1", "stage 0, update of micro-batch 0", "whether an update is due"),
        ("F0 F1 B0 B1 U0 F2/0 B2 U1", "stage 0, forward of micro-batch 2", "expected 1, the newest version"),
        ("F0 F1/1 B0 B1 U0 F2/1 B2 U1", "stage 0, forward of micro-batch 1", "expected 0, the newest version"),
        ("F0 F1 B0 B1 U1 F2/1 B2 U1", "stage 0, update of micro-batch 1", "expected 0, the newest version"),
        ("F0 F1 B0 F2 B1 U0 B2 U0", "stage 0, update of micro-batch 0", "expected 1, the newest version"),
        ("F0 F1 B0 F2 B1 U0", "stage 0, at the end", "expected 3, all backwards"),
        ("F0 F1 B0 F2 B1 U0 B2", "stage 0, at the end", "no update that is due"),
    ],
)
def test_a_violation_is_told_by_stage_and_micro_batch(first: str, place: str, why: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(first=first)
    told = " ".join(str(caught.value).split())
    assert told.startswith(place), told
    assert why.removeprefix("expected ") in told, told


def test_more_in_flight_than_planned_is_told() -> None:
    with pytest.raises(PlanError, match="stage 0, forward of micro-batch 1") as caught:
        check(in_flight=(1, 1))
    assert "2 in flight" in str(caught.value)
    assert "at most 1" in str(caught.value)
    with pytest.raises(PlanError, match="stage 1, forward of micro-batch 1"):
        check(last=FIRST)


def test_the_last_stage_is_checked_too() -> None:
    with pytest.raises(PlanError, match="stage 1, forward of micro-batch 2"):
        check(last="F0 B0 F1 B1 U0 F2/0 B2 U1")
