"""The machine without an order: whatever arrives when, what holds of every order holds, and nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.actor.free import FreeMachine
from roundelay.actor.machine import Run
from roundelay.errors import InternalError
from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import Program
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.verify_free import check_free_run
from roundelay.lower.verify_schedule import Fired
from tests.actor.drive import Choice, World, at_random, in_turn, starving
from tests.lower.plans import FEW, edge_of, plan_of

MANY = 2000
"""Random orders of events in one test."""


def fired(world: World) -> list[list[Fired]]:
    """What each worker's machine fired."""
    return [
        [
            Fired(run.instruction.opcode, run.g, run.version, run.reads, run.distance, 0, run.stage)
            for run in runs
            if run.instruction.opcode != "read"
        ]
        for runs in world.runs
    ]


def letters(world: World) -> list[str]:
    """The forwards and backwards of each worker."""
    known = {"forward": "F", "backward": "B"}
    return ["".join(known.get(run.instruction.opcode, "") for run in runs) for runs in world.runs]


def checked(plan: Plan, counts: list[int], choose: Choice) -> World:
    """A run in which everything that holds of every order holds, and which came to its end."""
    world = World(plan, stream(counts)).run(choose)
    assert all(machine.halted for machine in world.machines), [machine.waits_for() for machine in world.machines]
    check_free_run(read(plan), counts, fired(world))
    assert not any(unread for machine in world.machines for unread in machine.unread.values())
    return world


@st.composite
def free_plans(draw: st.DrawFn) -> Plan:
    """Plans of one to five stages with skips, any slots, and any number in flight."""
    size = draw(st.integers(1, 5))
    pairs = [(a, b) for a in range(size) for b in range(a + 2, size)]
    skips = (
        [
            edge_of(a, b, slots=draw(st.integers(1, 3)), gradient=draw(st.booleans()))
            for a, b in draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3))
        ]
        if pairs
        else []
    )
    plan = plan_of("ravnest", size, draw(st.integers(1, 3)), slots=draw(st.integers(1, 3)), skips=skips)
    return with_in_flight(plan, [draw(st.integers(1, 6)) for _ in range(size)])


def with_in_flight(plan: Plan, counts: list[int]) -> Plan:
    """The plan with so many forwards in flight."""
    return replace(plan, stages=tuple(replace(s, in_flight=n) for s, n in zip(plan.stages, counts, strict=True)))


@FEW
@given(
    free_plans(),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.sampled_from([at_random, starving]),
    st.integers(0, 2**32),
)
def test_no_order_of_events_breaks_a_rule_or_stops_the_run(
    plan: Plan, counts: list[int], order: type, seed: int
) -> None:
    counts = [min(count, plan.micro_batches) for count in counts]
    checked(plan, counts, order(seed))


def test_thousands_of_random_orders_of_one_plan_are_many_orders_of_its_actions() -> None:
    plan = plan_of("ravnest", 3, 1, skips=[edge_of(0, 2, slots=2)])
    seen = {tuple(letters(checked(plan, [1] * 8, at_random(seed)))) for seed in range(MANY)}
    assert len(seen) > MANY // 4


def test_gradients_go_first_and_the_last_stage_never_reads_old_weights() -> None:
    world = checked(plan_of("ravnest", 3, 1), [1] * 12, in_turn)
    assert letters(world)[2] == "FB" * 12
    machine = FreeMachine(middle())
    for g in range(2):
        machine.arrive(0, header(g))
    run_whole(machine)
    machine.arrive(3, header(0))  # now a forward and a backward are possible
    run = machine.fire()
    assert run is not None
    assert (run.instruction.opcode, run.g) == ("backward", 0)


def test_no_more_forwards_run_than_may_be_in_flight() -> None:
    machine = FreeMachine(middle(in_flight=2, slots=4))
    for g in range(3):
        machine.arrive(0, header(g))
    assert [run_whole(machine), run_whole(machine)] == [["forward"], ["forward"]]
    assert machine.fire() is None
    assert machine.waits_for() == "backward of micro-batch 0 on stage 1 waits for message 0 on channel 3"
    assert not machine.wants_credit


def test_an_action_begins_only_when_all_of_its_results_have_a_slot() -> None:
    machine = FreeMachine(middle(slots=1, in_flight=4))
    machine.arrive(0, header(0))
    assert run_whole(machine) == ["forward"]
    machine.arrive(0, header(1))
    assert machine.fire() is None
    assert machine.wants_credit
    assert "forward of micro-batch 1 on stage 1 waits for a free slot of channel 2" in machine.waits_for()
    machine.grant(2)
    assert run_whole(machine) == ["forward"]


def test_an_update_belongs_to_the_backward_that_ends_its_batch() -> None:
    machine = FreeMachine(emit(read(plan_of("ravnest", 1, 2)))[0])
    done = []
    for _ in range(8):
        run = machine.fire()
        if run is None:
            break
        done.append(f"{run.instruction.opcode} {run.g} {run.version}")
        machine.finish(stream([2])[run.g] if run.instruction.opcode == "read" else None)
    assert done == ["read 0 0", "forward 0 0", "backward 0 0", "read 1 0", "forward 1 0", "backward 1 0", "update 1 0"]
    assert machine.halted
    assert machine.waits_for() == "the program has ended"


def test_what_its_program_does_not_allow_is_a_bug() -> None:
    machine = FreeMachine(middle())
    with pytest.raises(InternalError, match="channel 9"):
        machine.arrive(9, header(0))


def test_a_free_program_is_text_and_back() -> None:
    program = middle()
    assert "loop free over run" in str(program)
    assert Program.parse(str(program)) == program


def middle(*, slots: int = 2, in_flight: int = 4) -> Program:
    """The program of the second of three stages: channel 0 brings values, 1 goes back, 2 on, 3 brings gradients."""
    plan = with_in_flight(plan_of("ravnest", 3, 1, slots=slots), [4, in_flight, 1])
    program = emit(read(plan))[1]
    kinds = {c.id: (c.kind, c.read_by(1)) for c in program.channels}
    assert kinds == {0: ("forward", True), 1: ("gradient", False), 2: ("forward", False), 3: ("gradient", True)}
    return program


def header(g: int) -> MicroBatch:
    """Of a micro-batch of a long run."""
    return stream([1] * 99)[g]


def run_whole(machine: FreeMachine) -> list[str]:
    """Run instructions until none is possible after the first action; returns their opcodes."""
    done: list[str] = []
    while (run := machine.fire()) is not None:
        done.append(run.instruction.opcode)
        machine.finish()
        if not machine_is_within(machine):
            break
    return done


def machine_is_within(machine: FreeMachine) -> bool:
    """Whether an action has begun and is not complete."""
    return bool(machine._left)


def test_a_run_shows_what_it_executes() -> None:
    machine = FreeMachine(middle())
    machine.arrive(0, header(0))
    run = machine.fire()
    assert isinstance(run, Run)
    assert str(run) == "forward g=0 stage=1 version=0 takes=0[0] gives=2[0]"
