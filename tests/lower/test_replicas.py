"""Programs of replicas: what is exchanged when, proved on the virtual clock, and refused where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import Program
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.verify_schedule import check_run
from roundelay.planner.prove_plan import fired, prove
from roundelay.simulator import simulate
from tests.actor.drive import World, at_random, in_turn, starving
from tests.lower.plans import FEW, RULES, counts_for, plan_of, plans, replicated

JOBS = st.tuples(plans(RULES, 4, 3), st.integers(2, 3)).flatmap(
    lambda pair: st.tuples(st.just(replicated(*pair)), counts_for(pair[0], 8))
)


def test_the_program_of_a_replica() -> None:
    plan = replace(replicated(plan_of("1f1b", 2, 2), 2), clip="global:1")
    last = emit(read(plan))[3]
    assert str(last).splitlines() == [
        "worker 3 of 4",
        "loop every 1 over batch",
        "tapes 1",
        "channel 3 forward 2.0>3.1 slots 2",
        "channel 4 gradient 3.1>2.0 slots 2",
        "channel 6 weight-gradient 1.1,3.1>1.1,3.1 slots 1 by reduce-scatter(0),all-gather(0)",
        "channel 10 grad-norm 0.0>3.1 slots 1",
        "body",
        "  forward 1 g takes 3 mode stash",
        "  backward 1 g gives 4 weights forward mode stash",
        "  box 1 g gives 6",
        "  unbox 1 g takes 6",
        "  grad-norm-sq 1 g",
        "  update 1 g takes 10",
    ]
    assert Program.parse(str(last)) == last
    reader = emit(read(plan))[0]
    assert [str(i) for i in reader.body if i.opcode == "read"] == ["read 0 g+1 gives 0"]
    assert [program.registers for program in emit(read(plan))] == [2, 0, 0, 0]


@FEW
@given(JOBS, st.integers(0, 99))
def test_the_order_of_events_changes_nothing(job: tuple[Plan, list[int]], seed: int) -> None:
    plan, counts = job
    headers = stream(counts)
    worlds = [World(plan, headers).run(choice) for choice in (in_turn, at_random(seed), starving(seed))]
    assert all(machine.halted for world in worlds for machine in world.machines)
    assert worlds[0].texts == worlds[1].texts == worlds[2].texts
    slots = {channel.id: channel.slots for channel in channels_of(read(plan))}
    assert all(peak <= slots[number] for world in worlds for number, peak in world.unread_peak.items())


@FEW
@given(JOBS)
def test_every_replica_does_what_the_schedule_says(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    simulation = simulate(plan, emit(read(plan)), stream(counts))
    check_run(read(plan), counts, fired(simulation))
    first = plan.num_workers // plan.replicas
    for worker in range(plan.num_workers):
        boxed = [i for i in simulation.intervals_of(worker) if i.opcode == "unbox"]
        assert len(boxed) == len(counts) * len(plan.stages_of(worker))
        own = [(i.opcode, i.g, i.version, i.reads) for i in simulation.intervals_of(worker)]
        assert own == [(i.opcode, i.g, i.version, i.reads) for i in simulation.intervals_of(worker % first)]


def test_an_exchange_takes_the_time_of_its_bytes_when_the_last_has_begun() -> None:
    """Ten floats and a double: 20 + 8 bytes from the second holder to the first, then as many back."""
    plan = replace(replicated(plan_of("1f1b", 1, 1), 2), bytes_per_s=2.0, latency_s=1.0)
    simulation = simulate(plan, emit(read(plan)), stream([1]))
    at = {(i.worker, i.opcode): (i.start_s, i.end_s) for i in simulation.intervals}
    last = max(at[0, "box"][1], at[1, "box"][1])
    assert at[0, "unbox"][0] == at[1, "unbox"][0] == last + 2 * (1.0 + 28 / 2.0)
    assert at[1, "read"][0] == at[0, "read"][1] + 1.0, "a message of no bytes"


@pytest.mark.parametrize("broken", ["box", "unbox"])
def test_an_update_without_its_exchange_is_refused(broken: str) -> None:
    plan = replicated(plan_of("pipeoptim", 2, 2), 2)
    prove(plan)
    executed = fired(simulate(plan, emit(read(plan)), stream([2, 2])))
    left_out = [[f for f in own if f.opcode != broken or f.g < 2] for own in executed]
    with pytest.raises(PlanError, match=f"stage 0, .* after micro-batch 3: got no {broken} of that micro-batch"):
        check_run(read(plan), [2, 2], left_out)
