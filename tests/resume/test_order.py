"""Machines that start in mid-flight do what they would have done, whatever the rule, the sizes and the moment."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rules
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.simulator import Interval, simulate
from tests.lower.plans import FEW, counts_for, plans

JOBS = plans([rule.name for rule in rules()]).flatmap(lambda plan: st.tuples(st.just(plan), counts_for(plan)))
Done = tuple[str, int, int, int, int | None, int, int]


def done(intervals: Sequence[Interval]) -> list[Done]:
    """What a worker did, its times left out."""
    return [(i.opcode, i.g, i.version, i.reads, i.keep, i.distance, i.stage) for i in intervals]


def cut(whole: Sequence[Done], updates: int, first_g: int) -> tuple[dict[int, int], list[Done]]:
    """What is in flight behind so many updates of one worker, and what is to be done: it, again, and all the rest."""
    ends = [0, *(place + 1 for place, (opcode, *_) in enumerate(whole) if opcode == "update")]
    before, after = whole[: ends[updates]], whole[ends[updates] :]
    again = [one for one in before if one[0] in ("read", "forward") and one[1] >= first_g]
    return {one[1]: one[2] for one in again if one[0] == "forward"}, again + after


@FEW
@given(JOBS, st.data())
def test_a_machine_in_mid_flight_goes_on_as_the_whole_run_does(
    job: tuple[Plan, list[int]], data: st.DataObject
) -> None:
    plan, counts = job
    updates = data.draw(st.integers(0, len(counts) - 1))
    first_g = sum(counts[:updates])
    programs = emit(read(plan))
    whole = simulate(plan, programs, stream(counts))
    # each stage of a worker makes its own update
    cuts = [cut(done(whole.intervals_of(p.worker)), updates * len(p.stages), first_g) for p in programs]
    rest = simulate(
        plan,
        programs,
        stream(counts[updates:], start_g=first_g, start_batch=updates),
        [in_flight for in_flight, _ in cuts],
    )
    assert [done(rest.intervals_of(p.worker)) for p in programs] == [expected for _, expected in cuts]
