"""Holders that run alike: a few of them stand for all, in proofs and in the seconds of a run; else all of them run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError, RoundelayError
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import Instruction, Port, Program
from roundelay.lower.alike_holders import first_holders, run_alike
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planner import prove_plan
from roundelay.planner.prove_plan import fired, prove
from roundelay.simulator import held_by_stage, makespan, makespan_s, simulate
from tests.lower.plans import FEW, counts_for, edge_of, grids, on_grid, plan_of

JOBS = grids().flatmap(lambda plan: st.tuples(st.just(plan), counts_for(plan, 8)))
CLIPS = ("none", "global:1", "previous:1")


def clipped(plan: Plan, clip: str) -> Plan:
    """The plan with this clipping, where its rule allows that."""
    return replace(plan, clip="none" if clip == "global:1" and not read(plan).flushes else clip)


@FEW
@given(JOBS, st.sampled_from(CLIPS))
def test_the_seconds_of_two_holders_are_those_of_all(job: tuple[Plan, list[int]], clip: str) -> None:
    plan, headers = clipped(job[0], clip), stream(job[1])
    assert makespan_s(plan, headers) == simulate(plan, emit(read(plan)), headers).makespan_s


@FEW
@given(JOBS, st.lists(st.sampled_from([0.25, 1.0, 2.0]), min_size=16, max_size=16), st.booleans())
def test_the_seconds_are_those_of_unequal_workers_too(
    job: tuple[Plan, list[int]], speeds: list[float], by_stage: bool
) -> None:
    """Two holders stand for all where the holders of a stage are equally fast; else all are simulated."""
    every = [name for stage in job[0].stages for name in stage.workers]  # holders of a stage are neighbours, then
    own = dict(sorted([(every.index(worker.name), worker) for worker in job[0].workers]))
    plan, headers = replace(job[0], workers=tuple(own.values())), stream(job[1])
    first = {worker: stages[0] for worker, stages in enumerate(plan.worker_stages)}
    fast = [speeds[first[k] if by_stage else k % 16] for k in range(plan.num_workers)]
    edges = tuple(replace(edge, latency_s=0.3, bytes_per_s=3.0) for edge in plan.edges[1:])
    workers = tuple(replace(worker, speed=speed) for worker, speed in zip(plan.workers, fast, strict=True))
    plan = replace(plan, workers=workers, edges=plan.edges[:1] + edges)
    assert makespan_s(plan, headers) == simulate(plan, emit(read(plan)), headers).makespan_s
    if by_stage:
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(makespan, "simulate")
            makespan_s(plan, headers)


@FEW
@given(JOBS)
def test_no_plan_without_norms_is_simulated_in_full(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(makespan, "simulate")
        makespan_s(plan, stream(counts))


def test_the_word_of_a_free_slot_takes_the_latency_of_its_link() -> None:
    edge = replace(edge_of(0, 1, slots=1), latency_s=2.0, bytes_per_s=1e9)
    plan = replace(on_grid(plan_of("gpipe", 2, 4, slots=1), 2, 1), edges=(edge,))
    assert makespan_s(plan, stream([4])) == simulate(plan, emit(read(plan)), stream([4])).makespan_s


def test_a_reader_waits_for_the_registers_of_the_others() -> None:
    """Both ways of a message take longer than two micro-batches."""
    plan = replace(on_grid(plan_of("1f1b", 1, 6), 2, 1), latency_s=20.0)
    assert makespan_s(plan, stream([6])) == simulate(plan, emit(read(plan)), stream([6])).makespan_s


def test_a_first_holder_that_is_late_is_noticed() -> None:
    """Without a message's time the others read as early as the first one, and with less than that before it."""
    plan = on_grid(plan_of("1f1b", 2, 2), 2, 2)
    holders = makespan._Holders(plan, stream([2]))
    holders.free[0] = (1.0, 0.0)
    holders._read = lambda worker, g: holders.free[worker]  # type: ignore[method-assign]
    with pytest.raises(makespan._NotInStepError):
        holders.run()


@FEW
@given(JOBS, st.sampled_from(CLIPS))
def test_each_holder_does_what_the_first_one_does(job: tuple[Plan, list[int]], clip: str) -> None:
    plan, headers = clipped(job[0], clip), stream(job[1])
    programs, first = emit(read(plan)), first_holders(plan)
    assert run_alike(programs, emit(read(first)))
    of_first = {own[0].stage: own for own in fired(simulate(first, emit(read(first)), headers))}
    for own in fired(simulate(plan, programs, headers)):
        assert own == of_first[own[0].stage]


@FEW
@given(JOBS)
def test_what_a_worker_holds_is_the_same_if_each_instruction_is_looked_at(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    found = simulate(plan, emit(read(plan)), stream(counts)).workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_by_stage._HeldByStage, "is_settled", lambda *_: False)
        assert simulate(plan, emit(read(plan)), stream(counts)).workers == found


# --- faults

LAST = 7
"""A worker of 2 replicas x 2 places x 2 stages."""


def without(opcode: str, at: int = LAST) -> Callable[[Sequence[Program]], list[Program]]:
    """Programs of which one lacks the lines of an opcode."""
    return changed(at, lambda program: replace(program, body=tuple(i for i in program.body if i.opcode != opcode)))


def with_lines(at: int, change: Callable[[Instruction], Instruction]) -> Callable[[Sequence[Program]], list[Program]]:
    """Programs of which one has other lines."""
    return changed(at, lambda program: replace(program, body=tuple(map(change, program.body))))


def changed(at: int, change: Callable[[Program], Program]) -> Callable[[Sequence[Program]], list[Program]]:
    """Programs of which one is another."""
    return lambda programs: [change(own) if own.worker == at else own for own in programs]


def with_channels(program: Program, kind: str, **changes: object) -> Program:
    """A program that knows channels of a kind differently."""
    channels = [replace(own, **changes) if own.kind == kind else own for own in program.channels]  # type: ignore[arg-type]
    return replace(program, channels=tuple(channels))


def with_sums_swapped(program: Program) -> Program:
    """A program that sums gradients over the replicas first, and then over the mesh."""
    first, second = (own.id for own in program.channels if own.kind == "weight-gradient")
    other = {first: second, second: first}

    def line(own: Instruction) -> Instruction:
        takes, gives = (tuple(other.get(number, number) for number in ends) for ends in (own.takes, own.gives))
        return replace(own, takes=takes, gives=gives)

    order = sorted(program.channels, key=lambda own: other.get(own.id, own.id))
    return replace(program, channels=tuple(order), body=tuple(map(line, program.body)))


FAULTS = {
    "no exchange": without("box"),
    "no end of an exchange": without("unbox"),
    "an update before its exchange": changed(LAST, lambda p: replace(p, body=(*p.body[:-3], *p.body[:-4:-1]))),
    "no data": with_lines(4, lambda i: replace(i, takes=()) if i.opcode == "read" else i),
    "data for fewer": with_lines(0, lambda i: replace(i, gives=i.gives[1:]) if i.opcode == "read" else i),
    "fewer tapes": changed(4, lambda p: replace(p, tapes=p.tapes - 1)),
    "more slots": changed(LAST, lambda p: with_channels(p, "forward", slots=3)),
    "an exchange of fewer": changed(LAST, lambda p: with_channels(p, "boxed", sources=(Port(LAST, 1),))),
    "exchanges in another order": changed(LAST, lambda p: with_sums_swapped(p)),
    "more slots for norms": lambda programs: [with_channels(p, "grad-norm-sq", slots=9) for p in programs],
    "another version": with_lines(LAST, lambda i: replace(i, reads="entry") if i.opcode == "forward" else i),
    "no norm": with_lines(3, lambda i: replace(i, gives=()) if i.opcode == "grad-norm-sq" else i),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_holder_that_runs_another_program_is_not_alike(name: str) -> None:
    plan = replace(on_grid(plan_of("1f1b", 2, 2), 2, 2), clip="global:1")
    programs = emit(read(plan))
    assert run_alike(programs, emit(read(first_holders(plan))))
    assert not run_alike(FAULTS[name](programs), emit(read(first_holders(plan))))


@pytest.mark.parametrize("name", ["no exchange", "an update before its exchange", "no data", "another version"])
def test_a_fault_of_one_holder_is_found_by_the_proof(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = on_grid(plan_of("pipedream", 2, 2), 2, 2)
    prove(plan)
    prove_plan._prove.cache_clear()
    monkeypatch.setattr(prove_plan, "emit", lambda reading: FAULTS[name](emit(reading)))
    with pytest.raises(RoundelayError, match=r"worker|stage"):
        prove(plan)


def test_a_fault_of_every_first_holder_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs are alike then, and all are wrong."""
    plan = on_grid(plan_of("pipedream", 2, 2), 2, 2)
    prove_plan._prove.cache_clear()

    def faulty(reading: object) -> list[Program]:
        programs = emit(reading)  # type: ignore[arg-type]
        return [replace(p, body=tuple(i for i in p.body if i.opcode not in ("box", "unbox"))) for p in programs]

    monkeypatch.setattr(prove_plan, "emit", faulty)
    with pytest.raises(RoundelayError, match=r"stage 0, update after micro-batch .* got no unbox"):
        prove(plan)


def test_a_deadlock_is_told_by_the_numbers_of_all_workers() -> None:
    skips = [edge_of(0, 3, slots=1)]
    plan = on_grid(plan_of("1f1b", 4, 4, slots=1, skips=skips), 2, 2)
    with pytest.raises(PlanError, match=r"a deadlock: worker 0: .*worker 15: "):
        prove(plan)
