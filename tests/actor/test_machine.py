"""The machine: the order and versions of the plan, in whatever order its events arrive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.actor.loop import LoopMachine
from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.schedules import actions, schedule_named
from tests.actor.drive import Choice, World, at_random, in_turn, starving
from tests.lower.plans import ASYNCHRONOUS, FEW, RULES, counts_for, edge_of, plan_of, plans

JOBS = plans().flatmap(lambda plan: st.tuples(st.just(plan), counts_for(plan)))
ORDERS = st.sampled_from([at_random, starving])
SEEDS = st.integers(0, 2**32)
LETTERS = {"forward": "F", "backward": "B", "backward-weight": "W", "update": "U"}


def done(runs: list[Run]) -> list[str]:
    """What a worker did, as ``F0 B0 U0``; reads are no actions, and an update bears its batch's number."""
    shown = [(run, LETTERS[run.instruction.opcode]) for run in runs if run.instruction.opcode != "read"]
    return [f"{letter}{run.header.batch if letter == 'U' else run.g}" for run, letter in shown if run.header]


def expected_actions(plan: Plan, worker: int, counts: list[int]) -> list[str]:
    """The same from the schedule."""
    schedule = schedule_named(rule_named(plan.rule).schedule)
    return [f"{act.kind}{act.number}" for act in actions(schedule, plan.stages_of(worker), plan.num_stages, counts)]


# --- order and versions


@FEW
@given(JOBS)
def test_a_worker_does_what_the_schedule_says_in_its_order(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    world = World(plan, stream(counts)).run(in_turn)
    assert [done(runs) for runs in world.runs] == [expected_actions(plan, k, counts) for k in range(plan.num_stages)]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 4), (4, 8), (5, 2), (6, 1)])
def test_halves_are_run_in_the_order_of_their_schedule_through_short_batches(sizes: tuple[int, int]) -> None:
    plan, counts = plan_of("zb-h1", *sizes), [sizes[1], 1, sizes[1], max(1, sizes[1] - 1)]
    world = World(plan, stream(counts)).run(in_turn)
    assert [done(runs) for runs in world.runs] == [expected_actions(plan, k, counts) for k in range(plan.num_stages)]


@FEW
@given(JOBS)
def test_the_version_is_the_number_of_updates_before(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    for runs in World(plan, stream(counts)).run(in_turn).runs:
        updates = [run.instruction.opcode == "update" for run in runs]
        assert [run.version for run in runs] == [0, *accumulate(updates)][:-1]


def test_an_update_without_a_batch_s_end_is_passed_over() -> None:
    world = World(plan_of("pipedream", 1, 3), stream([3, 1, 2])).run(in_turn)
    assert done(world.runs[0]) == [
        "F0",
        "B0",
        "F1",
        "B1",
        "F2",
        "B2",
        "U0",
        "F3",
        "B3",
        "U1",
        "F4",
        "B4",
        "F5",
        "B5",
        "U2",
    ]


@FEW
@given(plans(ASYNCHRONOUS), st.data())
def test_async_versions_follow_the_closed_form(plan: Plan, data: st.DataObject) -> None:
    batches = data.draw(st.integers(1, max(1, 12 // plan.micro_batches)))
    counts = [plan.micro_batches] * batches
    for stage, runs in enumerate(World(plan, stream(counts)).run(in_turn).runs):
        lag = plan.num_stages - 1 - stage
        versions = [run.version for run in runs if run.instruction.opcode == "forward"]
        assert versions == [max(0, g - lag) // plan.micro_batches for g in range(sum(counts))]


@FEW
@given(plans(["pipeoptim"]), st.data())
def test_the_crossed_distance_leads_to_the_version_that_the_backward_finds(plan: Plan, data: st.DataObject) -> None:
    counts = data.draw(counts_for(plan))
    for runs in World(plan, stream(counts)).run(in_turn).runs:
        found = {run.g: run.version for run in runs if run.instruction.opcode == "backward"}
        forwards = [run for run in runs if run.instruction.opcode == "forward"]
        assert [run.version + run.distance for run in forwards] == [found[run.g] for run in forwards]


@pytest.mark.parametrize(("predictor", "more"), [("paper", 0), ("released-code", 1)])
def test_the_papers_distances_are_the_same_for_every_micro_batch(predictor: str, more: int) -> None:
    world = World(plan_of("pipeoptim", 4, 2, predictor=predictor), stream([2, 1, 2, 2])).run(in_turn)
    for stage, runs in enumerate(world.runs):
        assert {run.distance for run in runs if run.instruction.opcode == "forward"} == {3 - stage + more}
        assert {run.distance for run in runs if run.instruction.opcode != "forward"} == {0}


@FEW
@given(JOBS)
def test_in_flight_reaches_the_tapes_of_the_program_and_never_more(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    world = World(plan, stream(counts)).run(in_turn)
    window = max(counts) if schedule_named(rule_named(plan.rule).schedule).window == "batch" else sum(counts)
    tapes = [min(machine.program.tapes, window) for machine in world.machines]
    assert world.in_flight_peak == tapes


@FEW
@given(JOBS)
def test_the_end_of_an_epoch_is_not_the_end_of_the_run(job: tuple[Plan, list[int]]) -> None:
    """Asynchronous rules do not even drain there."""
    plan, counts = job
    headers = stream(counts)
    epochs = [header._replace(epoch=header.batch, ends_epoch=1) for header in headers]
    assert World(plan, epochs).run(in_turn).texts == World(plan, headers).run(in_turn).texts


# --- determinism


@given(JOBS, ORDERS, SEEDS)
def test_the_order_of_events_changes_nothing(
    job: tuple[Plan, list[int]], order: Callable[[int], Choice], seed: int
) -> None:
    """Instructions, versions, distances and slots are the plan's; the events only say when."""
    plan, counts = job
    calm, wild = World(plan, stream(counts)), World(plan, stream(counts))
    assert wild.run(order(seed)).texts == calm.run(in_turn).texts


@given(JOBS, ORDERS, SEEDS)
def test_a_run_that_ends_anywhere_drains_and_leaves_nothing_unread(
    job: tuple[Plan, list[int]], order: Callable[[int], Choice], seed: int
) -> None:
    plan, counts = job
    world = World(plan, stream(counts)).run(order(seed))
    for machine in world.machines:
        assert (machine.halted, machine.in_flight, machine.version) == (True, 0, len(counts))
        assert not any(machine.unread.values())
        assert machine.credits == {c: world.channels[c].slots for c in machine.credits}
        assert machine.waits_for() == "the program has ended"


@given(JOBS, ORDERS, SEEDS)
def test_no_message_arrives_without_a_slot_and_both_ends_number_it_alike(
    job: tuple[Plan, list[int]], order: Callable[[int], Choice], seed: int
) -> None:
    plan, counts = job
    world = World(plan, stream(counts)).run(order(seed))
    given_slots: dict[tuple[int, int], int] = {}
    taken_slots: dict[tuple[int, int], int] = {}
    for runs in world.runs:
        for run in runs:
            given_slots |= {(channel, run.g): slot for channel, slot in run.gives}
            taken_slots |= {(channel, run.g): slot for channel, slot in run.takes}
    numbers = [(c, g, g % world.channels[c].slots) for c in world.channels for g in range(sum(counts))]
    assert given_slots == taken_slots == {(c, g): slot for c, g, slot in numbers}
    assert all(world.unread_peak[c] <= channel.slots for c, channel in world.channels.items())


@FEW
@given(JOBS)
def test_every_header_is_known_to_every_worker_and_memory_of_it_is_bounded(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    headers = stream(counts, rows=3)
    world = World(plan, headers).run(in_turn)
    for machine, runs in zip(world.machines, world.runs, strict=True):
        known = [run for run in runs if run.instruction.opcode != "read"]
        assert [run.header._replace(entry=0) for run in known if run.header] == [headers[run.g] for run in known]
        assert {run.header.entry for run in known if run.header and run.g == 0} == {0}
        assert len(machine._headers) <= machine.program.tapes + 2


# --- continuing


@FEW
@given(plans(), st.integers(1, 40), st.integers(1, 9), st.data())
def test_a_continued_run_counts_on_from_its_first_micro_batch_and_version(
    plan: Plan, start_g: int, start_batch: int, data: st.DataObject
) -> None:
    counts = data.draw(counts_for(plan))
    fresh = World(plan, stream(counts)).run(in_turn)
    again = World(plan, stream(counts, start_g=start_g, start_batch=start_batch)).run(in_turn)
    for before, after in zip(fresh.runs, again.runs, strict=True):
        assert [run.g for run in after] == [run.g + start_g for run in before]
        assert [run.version for run in after] == [run.version + start_batch for run in before]
        assert [(run.instruction, run.distance) for run in after] == [(run.instruction, run.distance) for run in before]


@FEW
@given(plans(ASYNCHRONOUS), st.integers(0, 5), st.integers(1, 4))
def test_after_a_drained_end_updates_lag_only_back_to_the_start(plan: Plan, done_before: int, batches: int) -> None:
    """U(k, g) = floor(max(g0, g - lag) / M) for a run that continues at g0."""
    size = plan.micro_batches
    first = done_before * size
    headers = stream([size] * batches, start_g=first, start_batch=done_before)
    for stage, runs in enumerate(World(plan, headers).run(in_turn).runs):
        lag = plan.num_stages - 1 - stage
        forwards = [run for run in runs if run.instruction.opcode == "forward"]
        assert [(run.g, run.version) for run in forwards] == [
            (g, max(first, g - lag) // size) for g in range(first, first + size * batches)
        ]


# --- back-pressure


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_missing_grant_stops_the_producer(rule: str, slots: int) -> None:
    world = World(plan_of(rule, 2, 8, slots=slots), stream([8]), lost=[("grant", 0)]).run(in_turn)
    producer, consumer = world.machines
    assert [run.g for run in world.runs[0] if run.gives] == list(range(slots))
    assert producer.waits_for() == f"forward of micro-batch {slots} on stage 0 waits for a free slot of channel 0"
    assert not producer.halted
    assert not consumer.halted


def test_a_missing_message_stops_the_consumer_who_says_which() -> None:
    skip = edge_of(0, 2, gradient=False)
    world = World(plan_of("1f1b", 3, 4, skips=[skip]), stream([4]), lost=[("message", 2)]).run(in_turn)
    assert world.machines[2].waits_for() == "forward of micro-batch 0 on stage 2 waits for message 0 on channel 2"
    assert world.runs[2] == []


def test_all_that_is_lacking_is_named() -> None:
    middle = LoopMachine(emit(read(plan_of("1f1b", 3, 4, slots=1)))[1])
    middle.credits[2] = 0
    assert middle.fire() is None
    assert (
        middle.waits_for()
        == "forward of micro-batch 0 on stage 1 waits for message 0 on channel 0, a free slot of channel 2"
    )
