"""Emitted programs say what the rule says, in channels that both ends number alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from roundelay.errors import PlanError
from roundelay.ir.plan import Plan
from roundelay.ir.program import Channel, Instruction, Program
from roundelay.ir.rule import rule_named
from roundelay.lower.emit import channels_of, emit
from roundelay.schedules import schedule_named
from tests.lower.plans import FEW, RULES, edge_of, plan_of, plans

SKIP = edge_of(0, 2, slots=5, gradient=False)


def instructions(program: Program) -> list[Instruction]:
    """Of all blocks."""
    return [*program.warm_up, *program.steady, *program.drain]


def test_every_edge_has_a_channel_forward_and_one_back_if_a_gradient_travels() -> None:
    assert channels_of(plan_of("1f1b", 3, 4, skips=[SKIP])) == (
        Channel(0, "forward", 0, 1, 2),
        Channel(1, "gradient", 1, 0, 2),
        Channel(2, "forward", 0, 2, 5),
        Channel(3, "forward", 1, 2, 2),
        Channel(4, "gradient", 2, 1, 2),
    )


def test_a_program_in_the_middle_takes_and_gives_on_both_sides() -> None:
    assert str(emit(plan_of("1f1b", 3, 4))[1]).splitlines() == [
        "worker 1 of 3",
        "window batch",
        "lag 1",
        "tapes 2",
        "channel 0 forward 0>1 slots 2",
        "channel 1 gradient 1>0 slots 2",
        "channel 2 forward 1>2 slots 2",
        "channel 3 gradient 2>1 slots 2",
        "warm-up",
        "  forward g takes 0 gives 2 mode stash",
        "steady",
        "  forward g+1 takes 0 gives 2 mode stash",
        "  backward g takes 3 gives 1 weights forward mode stash",
        "  update g",
        "drain",
        "  backward g takes 3 gives 1 weights forward mode stash",
        "  update g",
    ]


def test_an_edge_that_skips_is_taken_where_it_ends_and_nowhere_else() -> None:
    programs = emit(plan_of("1f1b", 3, 4, skips=[SKIP]))
    assert [[c.id for c in program.channels] for program in programs] == [[0, 1, 2], [0, 1, 3, 4], [2, 3, 4]]
    assert [program.warm_up[-1].gives for program in programs] == [(0, 2), (3,), ()]
    assert [program.warm_up[-1].takes for program in programs] == [(), (0,), (2, 3)]
    assert [program.drain[0].takes for program in programs] == [(1,), (4,), ()]


@FEW
@given(plans())
def test_only_the_first_worker_reads_and_every_block_ends_with_its_update(plan: Plan) -> None:
    for program in emit(plan):
        assert program.registers == (2 if program.worker == 0 else 0)
        blocks = (program.warm_up, program.steady, program.drain)
        opcodes = [[i.opcode for i in block if i.opcode != "backward-weight"] for block in blocks]
        ahead = ["read", "forward"] if program.worker == 0 else ["forward"]
        assert opcodes == [ahead, [*ahead, "backward", "update"], ["backward", "update"]]


@FEW
@given(plans())
def test_forwards_run_a_lag_ahead_and_backwards_stay_at_g(plan: Plan) -> None:
    schedule = schedule_named(rule_named(plan.rule).schedule)
    for k, program in enumerate(emit(plan)):
        lag = schedule.lag(k, plan.num_stages, plan.micro_batches)
        assert (program.worker, program.num_workers, program.lag, program.window) == (
            k,
            plan.num_stages,
            lag,
            schedule.window,
        )
        assert {i.offset for i in program.steady if i.opcode in ("read", "forward")} == {lag}
        back = [i for i in (*program.steady, *program.drain) if i.opcode in ("backward-weight", "update")]
        assert {i.offset for i in back} == {-k if plan.rule == "zb-h1" else 0}
        passes = [i for i in (*program.warm_up, *program.drain) if i.opcode in ("read", "forward", "backward")]
        assert {i.offset for i in (*passes, *program.tail)} == {0}


def test_a_program_of_halves_owes_as_many_as_its_stage_s_number_and_then_settles() -> None:
    first, middle, last = emit(plan_of("zb-h1", 3, 4))
    assert [program.owed for program in (first, middle, last)] == [1, 2, 3]
    assert first.tail == ()
    assert str(middle).splitlines()[11:] == [
        "steady",
        "  forward g+1 takes 0 gives 2 mode stash",
        "  backward g takes 3 gives 1 weights forward mode stash",
        "  backward-weight g-1",
        "  update g-1",
        "drain",
        "  backward g takes 3 gives 1 weights forward mode stash",
        "  backward-weight g-1",
        "  update g-1",
        "tail",
        "  backward-weight g",
        "  update g",
    ]
    assert [i.offset for i in last.steady] == [0, 0, -2, -2]


@FEW
@given(plans())
def test_every_channel_has_one_giver_and_one_taker(plan: Plan) -> None:
    programs = emit(plan)
    for channel in channels_of(plan):
        givers = {p.worker for p in programs for i in instructions(p) if channel.id in i.gives}
        takers = {p.worker for p in programs for i in instructions(p) if channel.id in i.takes}
        assert (givers, takers) == ({channel.source}, {channel.target})
        assert [p.worker for p in programs if channel in p.channels] == sorted([channel.source, channel.target])
        opcodes = {i.opcode for p in programs for i in instructions(p) if channel.id in (*i.gives, *i.takes)}
        assert opcodes == {"forward" if channel.kind == "forward" else "backward"}


@pytest.mark.parametrize(
    ("rule", "micro_batches", "tapes"),
    [
        ("gpipe", 8, [8, 8, 8, 8]),
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 2, [2, 2, 2, 1]),
        ("pipedream", 1, [4, 3, 2, 1]),
        ("pipeoptim", 8, [4, 3, 2, 1]),
    ],
)
def test_the_tapes_are_the_schedule_s_memory(rule: str, micro_batches: int, tapes: list[int]) -> None:
    assert [program.tapes for program in emit(plan_of(rule, 4, micro_batches))] == tapes


@pytest.mark.parametrize(
    ("rule", "backward", "weights"),
    [
        ("pipedream", "stash", "forward"),
        ("pipeoptim", "stash", "forward"),
        ("pipeoptim", "recompute", "live"),
        ("pipeoptim", "mixed", "live"),
        ("gpipe", "recompute", "live"),
    ],
)
def test_a_backward_says_which_weights_it_reads_and_both_passes_say_the_mode(
    rule: str, backward: str, weights: str
) -> None:
    for program in emit(plan_of(rule, 3, 2, backward=backward)):
        passes = [i for i in instructions(program) if i.opcode in ("forward", "backward")]
        assert {i.mode for i in passes} == {backward}
        assert {i.weights for i in passes if i.opcode == "backward"} == {weights}
        assert {i.weights for i in passes if i.opcode == "forward"} == {""}


@pytest.mark.parametrize(
    ("rule", "predictor", "distances"),
    [
        ("pipeoptim", "improved", ["crossed", "crossed", "crossed"]),
        ("pipeoptim", "paper", ["2", "1", "0"]),
        ("pipeoptim", "released-code", ["3", "2", "1"]),
        ("pipedream", "none", ["", "", ""]),
        ("1f1b", "none", ["", "", ""]),
    ],
)
def test_a_forward_says_how_far_it_predicts(rule: str, predictor: str, distances: list[str]) -> None:
    programs = emit(plan_of(rule, 3, 1, predictor=predictor))
    forwards = [{i.distance for i in instructions(p) if i.opcode == "forward"} for p in programs]
    assert forwards == [{text} for text in distances]
    assert {i.distance for p in programs for i in instructions(p) if i.opcode != "forward"} == {""}


@pytest.mark.parametrize("rule", RULES)
def test_one_stage_alone_needs_no_channels(rule: str) -> None:
    (program,) = emit(plan_of(rule, 1, 3))
    assert program.channels == ()
    assert all((i.takes, i.gives) == ((), ()) for i in instructions(program))


@FEW
@given(plans())
def test_times_and_bytes_change_no_program(plan: Plan) -> None:
    stages = tuple(replace(s, forward_s=9.0, tape_bytes=1) for s in plan.stages)
    slower = replace(plan, latency_s=3.0, read_s=2.0, stages=stages)
    assert emit(slower) == emit(plan)


def test_a_plan_of_an_unknown_rule_has_no_programs() -> None:
    with pytest.raises(PlanError, match="the update rule"):
        emit(replace(plan_of("1f1b", 2, 2), rule="2f2b"))
