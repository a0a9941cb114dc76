"""ZB-V, from the order of actions to the simulated clock: D workers with two stages each, M micro-batches a batch.

Worker k runs stages k and 2D - 1 - k; unless told otherwise a forward and either half of a backward take a second each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.action import Action
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import Program
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_plan
from roundelay.lower.verify_schedule import check_run
from roundelay.planner.memory_model import estimate_memory
from roundelay.planner.prove_plan import fired, prove
from roundelay.schedule_grid import staircase
from roundelay.schedules import SCHEDULES, actions
from roundelay.simulator import Simulation, simulate
from tests.actor.drive import Choice, World, at_random, in_turn, starving
from tests.lower.plans import FEW, by_rule, edge_of, plan_of

V, PAIRS = SCHEDULES["zb-v"], SCHEDULES["1f1b"]
PLACES = st.integers(1, 6).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size)))
COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 12))


def shown(acts: Sequence[Action], worker: int) -> str:
    """As ``F0 f0``, small letters for the worker's second stage."""
    return " ".join(f"{a.kind if a.stage == worker else a.kind.lower()}{a.number}" for a in acts)


def arms(worker: int, workers: int) -> tuple[int, int]:
    """The two stages of a worker."""
    return worker, 2 * workers - 1 - worker


def v_plan(workers: int, micro_batches: int, times: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Plan:
    """A plan of ``zb-v``: seconds of a forward, of a backward's first half and of its second, on every stage."""
    plan = plan_of("zb-v", 2 * workers, micro_batches, slots=2 * workers)
    forward_s, backward_s, weights_s = times
    stage = replace(plan.stages[0], forward_s=forward_s, backward_s=backward_s, weights_s=weights_s)
    return replace(plan, stages=tuple(replace(stage, workers=one.workers) for one in plan.stages))


def sim(plan: Plan, counts: Sequence[int]) -> Simulation:
    """A run with these micro-batches in its batches."""
    return simulate(plan, emit(read(plan)), stream(list(counts)))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Plan, list[int]]:
    """A plan, with or without an edge that skips stages, and micro-batches of each batch of a run."""
    workers, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    pairs = [(k, j) for k in range(2 * workers) for j in range(k + 2, 2 * workers)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2)) if pairs else []
    skips = [edge_of(k, j, slots=2 * workers, gradient=draw(st.booleans())) for k, j in chosen]
    plan = plan_of("zb-v", 2 * workers, micro_batches, slots=2 * workers, skips=skips)
    return plan, draw(st.lists(st.integers(1, micro_batches), min_size=1, max_size=4))


# --- the order


@pytest.mark.parametrize(
    ("worker", "workers", "count", "expected"),
    [
        (0, 2, 3, "F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 u0 B1 W1 B2 W2 U0"),
        (1, 2, 3, "F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 u0 W2 U0"),
        (0, 2, 1, "F0 f0 b0 w0 u0 B0 W0 U0"),
        (0, 1, 2, "F0 f0 b0 w0 F1 B0 W0 f1 b1 w1 u0 B1 W1 U0"),
    ],
)
def test_one_batch(worker: int, workers: int, count: int, expected: str) -> None:
    assert shown(actions(V, arms(worker, workers), 2 * workers, [count]), worker) == expected


@FEW
@given(PLACES, COUNTS)
def test_a_worker_does_everything_of_both_stages_once_and_in_order(place: tuple[int, int], counts: list[int]) -> None:
    worker, workers = place
    acts, total = actions(V, arms(worker, workers), 2 * workers, counts), sum(counts)
    for stage in (worker, 2 * workers - 1 - worker):
        for kind, size in (("F", total), ("B", total), ("W", total), ("U", len(counts))):
            assert [a.number for a in acts if (a.stage, a.kind) == (stage, kind)] == list(range(size))
    at = {(a.stage, a.kind, a.number): i for i, a in enumerate(acts)}
    for (stage, kind, g), i in at.items():
        if kind == "W":
            assert at[stage, "F", g] < at[stage, "B", g] < i
    assert len(acts) == 2 * (3 * total + len(counts))


@FEW
@given(PLACES, COUNTS)
def test_either_stage_runs_forwards_and_first_halves_as_1f1b_does_on_as_many_stages(
    place: tuple[int, int], counts: list[int]
) -> None:
    worker, workers = place
    acts = actions(V, arms(worker, workers), 2 * workers, counts)
    for stage in (worker, 2 * workers - 1 - worker):
        mine = [a for a in acts if a.stage == stage and a.kind in "FB"]
        assert mine == [a for a in actions(PAIRS, [stage], 2 * workers, counts) if a.kind in "FB"]


@FEW
@given(PLACES, COUNTS)
def test_a_stage_s_update_follows_the_last_second_half_of_its_batch_at_once(
    place: tuple[int, int], counts: list[int]
) -> None:
    worker, workers = place
    acts = actions(V, arms(worker, workers), 2 * workers, counts)
    lasts = [end - 1 for end in accumulate(counts)]
    for i, a in enumerate(acts):
        if a.kind == "U":
            assert acts[i - 1] == Action(a.stage, "W", lasts[a.number])


@FEW
@given(PLACES, st.integers(1, 9), st.integers(0, 8))
def test_a_short_batch_is_a_full_one_without_what_it_does_not_have(
    place: tuple[int, int], micro_batches: int, fewer: int
) -> None:
    worker, workers = place
    count = max(1, micro_batches - fewer)
    order = V.body(arms(worker, workers), 2 * workers, micro_batches).actions
    short = [a for a in actions(V, arms(worker, workers), 2 * workers, [count], micro_batches) if a.kind != "U"]
    assert short == [a for a in order if a.number < count]


@FEW
@given(PLACES, COUNTS)
def test_a_worker_holds_no_more_than_twice_as_many_half_stages_as_there_are_workers(
    place: tuple[int, int], counts: list[int]
) -> None:
    """Counted on both stages are those that are forward and whose weights' half is to come: 2D halves are D wholes."""
    acts = actions(V, arms(*place), 2 * place[1], counts)
    held = max(accumulate({"F": 1, "W": -1}.get(a.kind, 0) for a in acts))
    assert held <= 2 * place[1]
    if max(counts) >= 2 * place[1] - 1:
        assert held == 2 * place[1]


@FEW
@given(st.integers(1, 6), COUNTS)
def test_the_orders_of_all_workers_fit_together(workers: int, counts: list[int]) -> None:
    """Executed together, with each action waiting for what it needs from other stages, they come to an end."""
    rows = [actions(V, arms(k, workers), 2 * workers, counts) for k in range(workers)]
    at, done, moved = [0] * workers, set(), True
    while moved:
        moved = False
        for k, acts in enumerate(rows):
            while at[k] < len(acts):
                act = acts[at[k]]
                need = {"F": (act.stage - 1, "F", act.number), "B": (act.stage + 1, "B", act.number)}.get(act.kind)
                if need is not None and 0 <= need[0] < 2 * workers and need not in done:
                    break
                done.add((act.stage, act.kind, act.number))
                at[k], moved = at[k] + 1, True
    assert at == [len(acts) for acts in rows]


# --- the program


def test_every_line_of_a_program_says_its_stage() -> None:
    first, last = emit(read(plan_of("zb-v", 4, 1, slots=4)))
    assert str(last).splitlines() == [
        "worker 1 of 2",
        "loop every 1 over batch",
        "tapes 2",
        "owed 1",
        "channel 0 forward 0.0>1.1 slots 4",
        "channel 1 gradient 1.1>0.0 slots 4",
        "channel 2 forward 1.1>1.2 slots 4",
        "channel 3 gradient 1.2>1.1 slots 4",
        "channel 4 forward 1.2>0.3 slots 4",
        "channel 5 gradient 0.3>1.2 slots 4",
        "body",
        "  forward 1 g takes 0 gives 2 mode stash",
        "  forward 2 g takes 2 gives 4 mode stash",
        "  backward 2 g takes 5 gives 3 weights forward mode stash",
        "  backward-weight 2 g",
        "  update 2 g",
        "  backward 1 g takes 3 gives 1 weights forward mode stash",
        "  backward-weight 1 g",
        "  update 1 g",
    ]
    assert (first.stages, last.stages) == ((0, 3), (1, 2))


@FEW
@given(jobs())
def test_an_emitted_program_is_read_as_it_is_printed(job: tuple[Plan, list[int]]) -> None:
    programs = emit(read(job[0]))
    assert [Program.parse(str(program)) for program in programs] == list(programs)


@pytest.mark.parametrize("line", ["lag 2", "warm-up", "body", "  forward x g takes 0 gives 2 mode stash"])
def test_a_line_that_no_such_program_has_is_refused(line: str) -> None:
    lines = str(emit(read(plan_of("zb-v", 4, 1)))[1]).splitlines()
    for at in (2, 11):
        with pytest.raises(PlanError, match="of a program"):
            Program.parse("\n".join([*lines[:at], line, *lines[at:]]) + "\n")


def test_a_worker_runs_the_stages_of_both_arms() -> None:
    plan = plan_of("zb-v", 6, 4)
    assert (tuple(map(plan.worker_of, range(plan.num_stages))), plan.num_workers) == ((0, 1, 2, 2, 1, 0), 3)
    assert plan.worker_stages == ((0, 5), (1, 4), (2, 3))
    with pytest.raises(PlanError, match="workers of the plan's stages: got w0: stages 0 and 5"):
        check_plan(replace(plan, rule="zb-h1"))


# --- the machine, and what is proved


@FEW
@given(jobs(), st.sampled_from([at_random, starving]), st.integers(0, 2**32))
def test_machines_do_what_the_schedule_says_in_whatever_order_events_arrive(
    job: tuple[Plan, list[int]], order: Callable[[int], Choice], seed: int
) -> None:
    plan, counts = job
    calm, wild = World(plan, stream(counts)).run(in_turn), World(plan, stream(counts)).run(order(seed))
    assert wild.texts == calm.texts
    letters = {"forward": "F", "backward": "B", "backward-weight": "W", "update": "U"}
    for k, runs in enumerate(calm.runs):
        shown = [(run, letters[run.instruction.opcode]) for run in runs if run.instruction.opcode in letters]
        done = [Action(r.stage, x, r.header.batch if x == "U" else r.g) for r, x in shown if r.header]  # type: ignore[arg-type]
        assert done == actions(V, plan.stages_of(k), plan.num_stages, counts, plan.micro_batches)
        machine = calm.machines[k]
        assert (machine.halted, machine.in_flight, set(machine.versions.values())) == (True, 0, {len(counts)})
        assert not any(machine.unread.values())
        assert machine.credits == {c: calm.channels[c].slots for c in machine.credits}
        assert len(machine._headers) <= plan.micro_batches


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 1), (2, 3), (2, 4), (3, 8), (4, 8), (4, 3)])
def test_a_plan_is_proved(sizes: tuple[int, int]) -> None:
    prove(v_plan(*sizes))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (3, 8), (4, 3)])
@pytest.mark.parametrize("clip", ["previous:1", "global:1"])
def test_a_plan_whose_stages_tell_their_squares_is_proved(clip: str, sizes: tuple[int, int]) -> None:
    prove(replace(v_plan(*sizes), clip=Clip.parse(clip)))


def test_updates_that_wait_for_the_whole_come_behind_both_stages_gradients() -> None:
    """Else a worker's upper stage would wait for the norm, and the norm for its lower stage."""
    plan, counts = replace(v_plan(2, 2), clip=Clip.parse("global:1")), [2, 1]
    for k, mine in enumerate(fired(sim(plan, counts))):
        down, up = plan.worker_stages[k]
        acts = [(f.opcode, f.stage) for f in mine]
        last = max(i for i, (opcode, _) in enumerate(acts[: len(acts) * 2 // 3]) if opcode == "grad-norm-sq")
        assert acts[last + 1 : last + 3] == [("update", down), ("update", up)]
    usual = sim(replace(plan, clip=Clip.parse("previous:1")), counts).intervals_of(0)
    assert [(i.opcode, i.stage) for i in usual if i.opcode in ("grad-norm-sq", "update")][:4] == [
        ("grad-norm-sq", 3),
        ("update", 3),
        ("grad-norm-sq", 0),
        ("update", 0),
    ]


def test_a_worker_that_swaps_two_stages_is_refused_with_the_place() -> None:
    plan, counts = v_plan(2, 3), [3, 3]
    done = fired(sim(plan, counts))
    check_run(read(plan), counts, done)
    acts = [f for f in done[1] if f.opcode != "read"]
    swapped = [acts[0], acts[2], acts[1], *acts[3:]]  # F1 before f0: either stage's own order stays what it was
    with pytest.raises(PlanError, match="worker 1, action 1: got 1F1; expected 2F0"):
        check_run(read(plan), counts, [done[0], swapped])


def test_stages_that_do_not_make_a_v_are_refused() -> None:
    plan = plan_of("zb-v", 4, 2)
    rows = tuple(replace(stage, workers=plan.stages[k // 2 * 2].workers) for k, stage in enumerate(plan.stages))
    with pytest.raises(PlanError, match="got w0: stages 0 and 1; w1: stages 2 and 3; expected 2 for each worker"):
        check_plan(replace(plan, stages=rows))
    with pytest.raises(PlanError, match="expected 2 for each worker"):
        check_plan(plan_of("zb-v", 3, 2))


# --- the simulated clock


def test_two_workers_by_hand() -> None:
    """Worker 0 waits for nothing; its neighbour does everything a slot later."""
    rows = [line.split("|")[1] for line in staircase(v_plan(2, 3), 1).splitlines()]
    first = "F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2' B1 W1 B2 W2' ·"
    second = "· F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2' W2'"
    assert [" ".join(row.split()) for row in rows] == [first, second]


@FEW
@given(SIZES, st.integers(1, 3))
def test_equal_parts_leave_no_bubble(sizes: tuple[int, int], batches: int) -> None:
    """M >= 2D - 1 and f = b = w: every worker works without a pause, each begins a slot after the one before it."""
    workers, micro_batches = sizes[0], 2 * sizes[0] - 2 + sizes[1]
    run = sim(v_plan(workers, micro_batches), [micro_batches] * batches)
    assert run.makespan_s == 6.0 * micro_batches * batches + workers - 1
    for k, report in enumerate(run.workers):
        mine = [i for i in run.intervals_of(k) if i.opcode != "read"]
        assert report.busy_s == mine[-1].end_s - mine[0].start_s == 6.0 * micro_batches * batches


def test_the_figures_of_the_documents() -> None:
    """Milliseconds of a batch of 8 on four workers, 20 ms for each part of a worker's work on one micro-batch."""

    def period(plan: Plan) -> float:
        one, two = (sim(plan, [8] * n).makespan_s for n in (4, 5))
        return two - one

    halves = by_rule(v_plan(2, 8), "zb-h1")  # four stages, a worker each
    whole = {"zb-h1": halves, "1f1b": replace(halves, rule="1f1b"), "pipedream": replace(halves, rule="pipedream")}
    assert {rule: 20 * period(plan) for rule, plan in whole.items()} == {"zb-h1": 540, "1f1b": 660, "pipedream": 480}
    assert 10 * period(v_plan(4, 8)) == 480


@FEW
@given(SIZES, st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3))
def test_a_batch_takes_no_longer_than_by_1f1b_with_as_many_workers(
    sizes: tuple[int, int], times: tuple[float, float, float]
) -> None:
    """Whose stages are two of these; messages take no time."""
    workers, micro_batches = sizes
    doubled = v_plan(workers, micro_batches, (2 * times[0], 2 * times[1], 2 * times[2]))
    plain = by_rule(replace(doubled, stages=doubled.stages[:workers], edges=doubled.edges[: workers - 1]), "1f1b")
    counts = [micro_batches] * 3
    assert sim(v_plan(workers, micro_batches, times), counts).makespan_s <= sim(plain, counts).makespan_s


@FEW
@given(jobs())
def test_a_worker_is_busy_for_all_it_does_and_never_twice_at_a_time(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    run = sim(plan, counts)
    for k, report in enumerate(run.workers):
        assert report.busy_s == 2 * sum(counts) * 3.0  # f = 1, b = 2 in plans made by hand
        mine = run.intervals_of(k)
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_no_more_slots_make_it_faster(micro_batches: int) -> None:
    plan = v_plan(3, micro_batches)
    more = replace(plan, edges=tuple(replace(edge, slots=100) for edge in plan.edges))
    assert sim(plan, [micro_batches] * 2).makespan_s == sim(more, [micro_batches] * 2).makespan_s


def test_what_stays_on_a_worker_takes_no_time_to_travel() -> None:
    """D = 1: both stages on one worker, and messages of an hour."""
    slow = replace(v_plan(1, 2), latency_s=3600.0)
    assert sim(slow, [2]).makespan_s == 12.0
    there_and_back = replace(v_plan(2, 1), latency_s=100.0)
    assert (
        sim(there_and_back, [1]).makespan_s == 4 * 100.0 + 4 + 4 + 2
    )  # and at the turn, and at the end, a weights' half


def test_the_ledger_counts_both_stages_of_a_worker() -> None:
    plan = v_plan(2, 4)
    stages = [replace(s, parameter_bytes=10**k, tape_bytes=1, owed_bytes=0) for k, s in enumerate(plan.stages)]
    first, last = estimate_memory(replace(plan, stages=tuple(stages)), [1, 2, 4, 8])
    assert (first.weights, first.gradients, first.optimizer, first.versions) == (1001, 1001, 9, 0)
    assert (last.weights, last.optimizer) == (110, 6)
    assert (first.tapes, last.tapes) == (4, 4)  # 2D halves
