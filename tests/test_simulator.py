"""The simulator against small cases worked out by hand, and against the laws of pipelines.

Unless a test says otherwise a forward takes f = 1 s, a backward b = 2 s, updates and messages nothing: sums are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.simulator import Simulation, simulate
from roundelay.simulator.held_by_stage import peaks
from tests.actor.drive import World, in_turn
from tests.lower.plans import ASYNCHRONOUS, FEW, RULES, counts_for, edge_of, plan_of, plans

JOBS = plans().flatmap(lambda plan: st.tuples(st.just(plan), counts_for(plan)))
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 8))
FLUSHING = ("gpipe", "1f1b")


def sim(plan: Plan, counts: Sequence[int]) -> Simulation:
    """A run with these micro-batches in its batches."""
    return simulate(plan, emit(read(plan)), stream(list(counts)))


def timed(rule: str, num_stages: int, micro_batches: int, **changes: Any) -> Plan:
    """A plan without repeated forwards, so that a backward takes b."""
    return plan_of(rule, num_stages, micro_batches, backward="stash", **changes)


def timeline(simulation: Simulation, worker: int, *, updates: bool = False) -> list[str]:
    """``F0 0-1`` for each forward and backward of a worker, in order."""
    letters = {"forward": "F", "backward": "B"} | ({"update": "U"} if updates else {})
    mine = [i for i in simulation.intervals_of(worker) if i.opcode in letters]
    return [f"{letters[i.opcode]}{i.g} {i.start_s:g}-{i.end_s:g}" for i in mine]


# --- worked out by hand


def test_gpipe_on_two_stages() -> None:
    run = sim(timed("gpipe", 2, 2), [2])
    assert timeline(run, 0) == ["F0 0-1", "F1 1-2", "B0 5-7", "B1 7-9"]
    assert timeline(run, 1) == ["F0 1-2", "F1 2-3", "B0 3-5", "B1 5-7"]
    assert (run.makespan_s, run.workers[0].busy_s) == (9.0, 6.0)
    assert run.bubble == pytest.approx(1 / 3)


def test_1f1b_on_two_stages() -> None:
    run = sim(timed("1f1b", 2, 2), [2, 1])
    assert timeline(run, 0) == ["F0 0-1", "F1 1-2", "B0 4-6", "B1 7-9", "F2 9-10", "B2 13-15"]
    assert timeline(run, 1) == ["F0 1-2", "B0 2-4", "F1 4-5", "B1 5-7", "F2 10-11", "B2 11-13"]


def test_1f1b_on_three_stages() -> None:
    run = sim(timed("1f1b", 3, 3), [3])
    assert timeline(run, 0) == ["F0 0-1", "F1 1-2", "F2 2-3", "B0 7-9", "B1 10-12", "B2 13-15"]
    assert timeline(run, 1) == ["F0 1-2", "F1 2-3", "B0 5-7", "F2 7-8", "B1 8-10", "B2 11-13"]
    assert timeline(run, 2) == ["F0 2-3", "B0 3-5", "F1 5-6", "B1 6-8", "F2 8-9", "B2 9-11"]


def test_async_on_two_stages_does_not_wait_for_the_batch() -> None:
    run = sim(timed("pipedream", 2, 1), [1, 1, 1])
    assert timeline(run, 0) == ["F0 0-1", "F1 1-2", "B0 4-6", "F2 6-7", "B1 7-9", "B2 10-12"]
    assert timeline(run, 1) == ["F0 1-2", "B0 2-4", "F1 4-5", "B1 5-7", "F2 7-8", "B2 8-10"]


def test_updates_take_their_time_after_the_batch() -> None:
    plan = timed("1f1b", 1, 2)
    run = sim(replace(plan, stages=(replace(plan.stages[0], update_s=0.5),)), [2, 1])
    assert timeline(run, 0, updates=True) == [
        *["F0 0-1", "B0 1-3", "F1 3-4", "B1 4-6", "U1 6-6.5"],
        *["F2 6.5-7.5", "B2 7.5-9.5", "U2 9.5-10"],
    ]
    assert run.workers[0].busy_s == 10.0


def test_recomputing_repeats_the_forward_in_the_backward_and_the_other_modes_do_not() -> None:
    ends = {mode: sim(plan_of("1f1b", 1, 1, backward=mode), [1]).makespan_s for mode in ("stash", "mixed", "recompute")}
    assert ends == {"stash": 3.0, "mixed": 3.0, "recompute": 4.0}


def test_a_message_takes_its_bytes_over_the_rate_and_the_latency() -> None:
    edge = replace(edge_of(0, 1), forward_bytes=30, backward_bytes=20)
    plan = timed("1f1b", 2, 1, edges=(edge,), latency_s=0.25, bytes_per_s=10.0)
    run = sim(plan, [1])
    assert timeline(run, 1) == ["F0 4.25-5.25", "B0 5.25-7.25"]
    assert timeline(run, 0) == ["F0 0-1", "B0 9.5-11.5"]


def test_messages_of_one_channel_leave_one_after_the_other() -> None:
    edge = replace(edge_of(0, 1, slots=4), forward_bytes=30)
    run = sim(timed("gpipe", 2, 3, edges=(edge,), bytes_per_s=10.0), [3])
    assert timeline(run, 0)[:3] == ["F0 0-1", "F1 1-2", "F2 2-3"]
    assert timeline(run, 1)[:3] == ["F0 4-5", "F1 7-8", "F2 10-11"]


def test_a_worker_takes_its_seconds_over_its_speed() -> None:
    plan = timed("gpipe", 2, 2)
    slow = replace(plan, workers=(plan.workers[0], replace(plan.workers[1], speed=0.5)))
    run = sim(slow, [2])
    assert timeline(run, 0) == ["F0 0-1", "F1 1-2", "B0 9-11", "B1 13-15"]
    assert timeline(run, 1) == ["F0 1-3", "F1 3-5", "B0 5-9", "B1 9-13"]
    fast = replace(plan, workers=tuple(replace(worker, speed=4.0) for worker in plan.workers))
    assert sim(fast, [2]).makespan_s == sim(plan, [2]).makespan_s / 4


def test_an_edge_may_have_a_link_of_its_own() -> None:
    edges = [replace(edge_of(k, k + 1), forward_bytes=30, backward_bytes=20) for k in range(2)]
    own = replace(edges[1], latency_s=0.25, bytes_per_s=10.0)
    run = sim(timed("1f1b", 3, 1, edges=(edges[0], own), latency_s=1.0, bytes_per_s=5.0), [1])
    assert timeline(run, 1) == ["F0 8-9", "B0 17.5-19.5"]
    assert timeline(run, 2) == ["F0 12.25-13.25", "B0 13.25-15.25"]
    assert timeline(run, 0) == ["F0 0-1", "B0 24.5-26.5"]
    waits = sim(timed("gpipe", 2, 2, edges=(replace(own, source=0, target=1, slots=1, bytes_per_s=1e9),)), [2])
    assert timeline(waits, 0)[:2] == ["F0 0-1", "F1 2.5-3.5"], "the word of a free slot takes its latency too"


def test_a_free_slot_is_known_only_after_the_latency() -> None:
    """One slot: F1 may start when the word that F0 was read has come back."""
    plan = timed("gpipe", 2, 2, slots=1, latency_s=0.25)
    run = sim(plan, [2])
    assert timeline(run, 0)[:2] == ["F0 0-1", "F1 2.5-3.5"]


def halved(num_stages: int, micro_batches: int, times: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Plan:
    """A plan of ``zb-h1``: seconds of a forward, of a backward's first half and of its second."""
    plan = plan_of("zb-h1", num_stages, micro_batches)
    forward_s, backward_s, weights_s = times
    stage = replace(plan.stages[0], forward_s=forward_s, backward_s=backward_s, weights_s=weights_s)
    return replace(plan, stages=tuple(replace(stage, workers=one.workers) for one in plan.stages))


def test_a_backward_in_two_halves_on_two_stages() -> None:
    run = sim(halved(2, 2), [2])
    letters = {"forward": "F", "backward": "B", "backward-weight": "W", "update": "U"}
    rows = [
        [f"{letters[i.opcode]}{i.g} {i.start_s:g}" for i in run.intervals_of(k) if i.opcode in letters] for k in (0, 1)
    ]
    assert rows[0] == ["F0 0", "F1 1", "B0 3", "W0 4", "B1 5", "W1 6", "U1 7"]
    assert rows[1] == ["F0 1", "B0 2", "F1 3", "B1 4", "W0 5", "W1 6", "U1 7"]


# --- data


def test_data_is_loaded_while_the_stages_compute() -> None:
    """A second for each batch; the second is loaded while the first is used, the third when a register is free."""
    run = sim(timed("pipedream", 1, 2, read_s=0.5), [2, 2, 2])
    assert [(load.worker, load.batch, load.start_s, load.end_s) for load in run.loads] == [
        (0, 0, 0.0, 1.0),
        (0, 1, 1.0, 2.0),
        (0, 2, 7.0, 8.0),
    ]
    assert [(i.start_s, i.end_s) for i in run.intervals if i.opcode == "read"] == [
        (0.0, 1.0), (4.0, 4.0), (7.0, 7.0), (10.0, 10.0), (13.0, 13.0), (16.0, 16.0)
    ]  # fmt: skip
    assert (run.makespan_s, run.workers[0].busy_s, run.workers[0].data_s) == (19.0, 18.0, 1.0)
    assert run.workers[0].registers_peak == 2


@FEW
@given(st.sampled_from(ASYNCHRONOUS), SIZES, st.sampled_from([0.25, 0.5, 1.0]))
def test_a_loader_that_is_no_slower_than_a_forward_costs_its_first_batch_and_no_more(
    rule: str, sizes: tuple[int, int], read_s: float
) -> None:
    num_stages, micro_batches = sizes
    plan, counts = timed(rule, num_stages, micro_batches), [micro_batches] * 5
    later = sim(replace(plan, read_s=read_s), counts)
    assert later.makespan_s == sim(plan, counts).makespan_s + read_s * micro_batches
    assert [report.data_s for report in later.workers] == [read_s * micro_batches] + [0.0] * (num_stages - 1)


@FEW
@given(st.sampled_from(ASYNCHRONOUS), SIZES, st.sampled_from([4.0, 10.0]))
def test_a_slower_loader_sets_the_rate(rule: str, sizes: tuple[int, int], read_s: float) -> None:
    num_stages, micro_batches = sizes
    run = sim(timed(rule, num_stages, micro_batches, read_s=read_s), [micro_batches] * 12)
    assert [load.end_s - load.start_s for load in run.loads] == [read_s * micro_batches] * 12
    ends = [i.end_s for i in run.intervals_of(num_stages - 1) if i.opcode == "backward"][::micro_batches]
    assert {b - a for a, b in pairwise(ends[num_stages + 1 :])} == {read_s * micro_batches}


def test_with_one_register_loading_and_computing_take_turns() -> None:
    plan = timed("pipedream", 1, 1, read_s=2.0)
    programs = emit(read(plan))
    ends = {n: simulate(plan, [replace(programs[0], registers=n)], stream([1] * 10)).makespan_s for n in (1, 2, 3)}
    assert ends == {1: 50.0, 2: 32.0, 3: 32.0}


def test_a_program_that_reads_without_a_register_stands_still() -> None:
    plan = timed("pipedream", 1, 1)
    with pytest.raises(PlanError, match="worker 0: got a deadlock: `read` without a register"):
        simulate(plan, [replace(emit(read(plan))[0], registers=0)], stream([1]))


def test_where_reading_takes_no_time_nothing_is_loaded() -> None:
    assert sim(timed("pipedream", 2, 1), [1, 1]).loads == ()


# --- laws


@FEW
@given(SIZES, st.integers(1, 3), st.sampled_from([(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.0, 1.0)]))
def test_halves_leave_a_bubble_of_forward_and_first_half_less_the_second(
    sizes: tuple[int, int], batches: int, times: tuple[float, float, float]
) -> None:
    """Qi et al., Sect. 2.3: (D - 1)(f + b - w) per batch, with M >= D and a second half no longer than f and b."""
    num_stages, micro_batches = sizes[0], sizes[0] + sizes[1] - 1
    f, b, w = times
    run = sim(halved(num_stages, micro_batches, times), [micro_batches] * batches)
    assert run.makespan_s == batches * (micro_batches * (f + b + w) + (num_stages - 1) * (f + b - w))


@FEW
@given(SIZES, st.integers(1, 3), st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3))
def test_halves_are_never_slower_than_1f1b(
    sizes: tuple[int, int], batches: int, times: tuple[float, float, float]
) -> None:
    """Whatever the times; a plan of halves run by `1f1b` takes both one after the other."""
    plan, counts = halved(*sizes, times), [sizes[1]] * batches
    assert sim(plan, counts).makespan_s <= sim(replace(plan, rule="1f1b"), counts).makespan_s


@FEW
@given(st.sampled_from(FLUSHING), SIZES, st.integers(1, 3))
def test_a_batch_takes_as_many_slots_of_time_as_micro_batches_and_further_stages(
    rule: str, sizes: tuple[int, int], batches: int
) -> None:
    """(M + D - 1)(f + b) for GPipe and for 1F1B alike."""
    num_stages, micro_batches = sizes
    run = sim(timed(rule, num_stages, micro_batches), [micro_batches] * batches)
    assert run.makespan_s == batches * (micro_batches + num_stages - 1) * 3.0
    assert run.bubble == pytest.approx((num_stages - 1) / (micro_batches + num_stages - 1), abs=1e-12)


@FEW
@given(st.sampled_from(ASYNCHRONOUS), SIZES, st.integers(1, 5))
def test_an_asynchronous_run_fills_and_drains_once(rule: str, sizes: tuple[int, int], batches: int) -> None:
    num_stages, micro_batches = sizes
    total = micro_batches * batches
    run = sim(timed(rule, num_stages, micro_batches), [micro_batches] * batches)
    assert run.makespan_s == (total + num_stages - 1) * 3.0
    assert run.bubble == pytest.approx((num_stages - 1) / (total + num_stages - 1), abs=1e-12)


@given(st.sampled_from(ASYNCHRONOUS), st.integers(2, 6))
def test_in_the_steady_state_every_stage_takes_one_micro_batch_per_f_and_b(rule: str, num_stages: int) -> None:
    run = sim(timed(rule, num_stages, 1), [1] * 20)
    for worker in range(num_stages):
        ends = [i.end_s for i in run.intervals_of(worker) if i.opcode == "backward"]
        assert {b - a for a, b in pairwise(ends)} == {3.0}


@FEW
@given(JOBS)
def test_a_worker_is_busy_for_all_it_does_and_never_twice_at_a_time(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    run = sim(plan, counts)
    backward_s = 3.0 if plan.backward == "recompute" else 2.0
    for worker, report in enumerate(run.workers):
        mine = run.intervals_of(worker)
        assert report.busy_s == sum(counts) * (1.0 + backward_s)
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
    assert run.makespan_s == max(i.end_s for i in run.intervals)
    assert run.bubble == pytest.approx(
        1 - sum(r.busy_s for r in run.workers) / run.makespan_s / len(run.workers), abs=1e-12
    )


@FEW
@given(JOBS)
def test_what_depends_on_another_stage_starts_after_it(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    at = {(i.worker, i.opcode, i.g): i for i in sim(plan, counts).intervals}
    for edge in plan.edges:
        for g in range(sum(counts)):
            assert at[edge.source, "forward", g].end_s <= at[edge.target, "forward", g].start_s
            if edge.gradient:
                assert at[edge.target, "backward", g].end_s <= at[edge.source, "backward", g].start_s


TIMES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0]), min_size=20, max_size=20)


@FEW
@given(JOBS, TIMES)
def test_times_change_when_things_happen_and_nothing_else(job: tuple[Plan, list[int]], times: list[float]) -> None:
    """The events are the machine's own, however it is driven."""
    plan, counts = job
    draw = iter(times)
    uneven = tuple(
        replace(stage, forward_s=next(draw), backward_s=next(draw), update_s=next(draw)) for stage in plan.stages
    )
    run = sim(replace(plan, stages=uneven, latency_s=next(draw)), counts)
    assert [list(texts) for texts in run.events] == World(plan, stream(counts)).run(in_turn).texts


# --- slots


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_one_slot_between_neighbours_slows_a_run_and_two_make_it_as_fast_as_can_be(rule: str, num_stages: int) -> None:
    ends = [sim(timed(rule, num_stages, 6, slots=slots), [6]).makespan_s for slots in (1, 2, 3, 8)]
    assert ends[0] > ends[1] == ends[2] == ends[3]


STANDSTILL = [(rule, num_stages) for rule in ("1f1b", *ASYNCHRONOUS) for num_stages in (3, 4, 5, 6, 7)]


@pytest.mark.parametrize(("rule", "num_stages"), STANDSTILL)
def test_an_edge_over_all_stages_needs_a_slot_for_every_two_of_them(rule: str, num_stages: int) -> None:
    """Forwards run D-1 ahead on stage 0 and gradients come back late: ⌊D/2⌋ slots keep the circle open."""
    needed = num_stages // 2
    skip = edge_of(0, num_stages - 1, slots=needed)
    sim(plan_of(rule, num_stages, 12, slots=1, skips=[skip]), [12])
    if needed > 1:
        with pytest.raises(PlanError):
            sim(plan_of(rule, num_stages, 12, slots=9, skips=[replace(skip, slots=needed - 1)]), [12])


@pytest.mark.parametrize("rule", RULES)
def test_one_slot_is_enough_where_nothing_comes_back_or_all_forwards_come_first(rule: str) -> None:
    skip = edge_of(0, 5, slots=1, gradient=rule == "gpipe")
    sim(plan_of(rule, 6, 12, slots=1, skips=[skip]), [12, 12])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_stages", [3, 4, 6])
def test_a_slot_for_each_stage_passed_and_two_more_make_a_skip_as_fast_as_can_be(rule: str, num_stages: int) -> None:
    far = num_stages - 1
    ends = [
        sim(timed(rule, num_stages, 8, skips=[edge_of(0, far, slots=slots)]), [8, 8]).makespan_s
        for slots in (far + 1, 100)
    ]
    assert ends[0] == ends[1]


def test_a_standstill_is_refused_with_every_worker_and_channel_that_waits() -> None:
    plan = plan_of("1f1b", 4, 8, slots=4, skips=[edge_of(0, 3, slots=1)])
    with pytest.raises(PlanError) as refusal:
        sim(plan, [8])
    waiting = refusal.value.got
    assert "worker 0: forward of micro-batch 3 on stage 0 waits for a free slot of channel 2" in waiting  # 0>3
    assert "worker 1: forward of micro-batch 3 on stage 1 waits for message 3 on channel 0" in waiting
    assert (
        "worker 3: backward of micro-batch 1 on stage 3 waits for a free slot of channel 3" in waiting
    )  # 3>0, gradient
    assert "Raise `slots`" in refusal.value.remedy


def test_slots_show_in_the_events_and_nowhere_else() -> None:
    one, two = (sim(plan_of("pipeoptim", 3, 2, slots=slots), [2, 2, 2]) for slots in (1, 2))
    assert one.events != two.events

    def without(events: tuple[tuple[str, ...], ...]) -> list[list[str]]:
        return [[text.replace("[1]", "[0]") for text in texts] for texts in events]

    assert without(one.events) == without(two.events)


@FEW
@given(JOBS, st.sampled_from([0.0, 0.5, 4.0]))
def test_never_more_on_the_way_than_slots(job: tuple[Plan, list[int]], latency_s: float) -> None:
    plan, counts = job
    channels = {c.id: c for program in emit(read(plan)) for c in program.channels}
    for worker, report in enumerate(sim(replace(plan, latency_s=latency_s), counts).workers):
        assert set(report.unread_peak) == {c.id for c in channels.values() if c.read_by(worker)}
        assert all(1 <= peak <= channels[c].slots for c, peak in report.unread_peak.items())


def test_a_slow_consumer_fills_every_slot() -> None:
    plan = timed("gpipe", 2, 6, slots=3)
    slow = (plan.stages[0], replace(plan.stages[1], forward_s=50.0))
    assert sim(replace(plan, stages=slow), [6]).workers[1].unread_peak == {0: 3}


# --- memory


@FEW
@given(JOBS)
def test_tapes_are_as_many_as_the_schedule_keeps_in_flight(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    for stage, report in enumerate(sim(plan, counts).workers):
        behind = plan.num_stages - stage
        expected = {
            "gpipe": max(counts),
            "1f1b": min(behind, max(counts)),
            "zb-h1": min(behind, max(counts)),
        }.get(plan.rule, min(behind, sum(counts)))
        assert report.tapes_peak == expected
        assert report.owed_peak == (min(stage + 1, max(counts)) if plan.rule == "zb-h1" else 0)
        if plan.rule != "zb-h1":
            assert report.tape_bytes_peak == expected * 10


def test_tapes_and_what_is_owed_are_added_up_when_both_are_there() -> None:
    """D = 4, M = 8, tapes of 10 bytes and debts of 4: lag + 1 tapes beside the k debts of the steady state."""
    run = sim(halved(4, 8), [8, 8])
    assert [report.tape_bytes_peak for report in run.workers] == [40, 34, 28, 22]


@pytest.mark.parametrize(
    ("rule", "backward", "held"),
    [
        ("gpipe", "stash", [1, 1, 1, 1]),
        ("1f1b", "stash", [1, 1, 1, 1]),
        ("1f1b", "recompute", [1, 1, 1, 1]),
        ("pipedream", "stash", [4, 3, 2, 1]),
        ("pipeoptim", "recompute", [2, 2, 2, 1]),
        ("pipeoptim", "mixed", [2, 2, 2, 1]),
        ("pipeoptim", "stash", [5, 4, 3, 1]),
        ("lookahead", "mixed", [2, 2, 2, 2]),
        ("lookahead", "recompute", [2, 2, 2, 2]),
        ("lookahead", "stash", [5, 4, 3, 2]),
        ("spectrain", "mixed", [2, 2, 3, 2]),
    ],
)
def test_weight_versions_alive_at_one_time(rule: str, backward: str, held: list[int]) -> None:
    run = sim(plan_of(rule, 4, 1, backward=backward), [1] * 16)
    assert [report.versions_held_peak for report in run.workers] == held


@pytest.mark.parametrize(("backward", "held"), [("recompute", [2, 2, 2]), ("stash", [4, 3, 2])])
def test_the_released_code_predicts_on_the_last_stage_too(backward: str, held: list[int]) -> None:
    run = sim(plan_of("pipeoptim", 3, 1, backward=backward, predictor="released-code"), [1] * 12)
    assert [report.versions_held_peak for report in run.workers] == held


@pytest.mark.parametrize(
    ("micro_batches", "gaps"), [(1, [3, 2, 1, 0]), (2, [2, 1, 1, 0]), (3, [1, 1, 1, 0]), (8, [1, 1, 1, 0])]
)
def test_forwards_read_at_most_the_lag_over_m_updates_behind(micro_batches: int, gaps: list[int]) -> None:
    run = sim(plan_of("pipedream", 4, micro_batches), [micro_batches] * 6)
    assert [report.versions_read for report in run.workers] == [(0, gap) for gap in gaps]


@pytest.mark.parametrize("rule", FLUSHING)
def test_flushing_rules_read_no_old_version(rule: str) -> None:
    run = sim(plan_of(rule, 4, 4), [4, 2, 4])
    assert {report.versions_read for report in run.workers} == {(0, 0)}


# --- continuing, and ends


@FEW
@given(JOBS, st.integers(1, 30), st.integers(1, 9))
def test_a_continued_run_takes_as_long_as_a_fresh_one(job: tuple[Plan, list[int]], start_g: int, batch: int) -> None:
    plan, counts = job
    later = simulate(plan, emit(read(plan)), stream(counts, start_g=start_g, start_batch=batch))
    assert (later.makespan_s, later.workers) == (sim(plan, counts).makespan_s, sim(plan, counts).workers)


def test_a_run_without_any_work_time_has_no_bubble() -> None:
    plan = plan_of("1f1b", 2, 2)
    free = tuple(replace(stage, forward_s=0.0, backward_s=0.0) for stage in plan.stages)
    run = sim(replace(plan, stages=free), [2])
    assert (run.makespan_s, run.bubble) == (0.0, 0.0)


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(2, 1), (4, 1), (4, 2), (5, 3)])
def test_norms_on_their_way_to_stage_0_hold_no_stage_up(num_stages: int, micro_batches: int) -> None:
    plan, counts = plan_of("pipedream", num_stages, micro_batches), [micro_batches] * 8
    assert sim(replace(plan, clip=Clip.parse("previous:1")), counts).makespan_s == sim(plan, counts).makespan_s


def test_a_version_that_no_later_forward_reads_is_held_until_the_next_forward() -> None:
    """What reads between an update and that forward holds both, and nothing else does."""
    plan = plan_of("1f1b", 1, 1)
    _, first, back, update, after, *_ = sim(plan, [1, 1]).intervals
    ran = [first._replace(keep=0), back, update, after, first._replace(g=1, version=1, reads=1, keep=1)]
    assert [i.opcode for i in ran] == ["forward", "backward", "update", "read", "forward"]
    assert peaks(emit(read(plan))[0], plan.stages, ran)["versions"] == 2
