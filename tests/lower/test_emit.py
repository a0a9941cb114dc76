"""Emitted programs say what the rule says, in channels that both ends number alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from roundelay.errors import PlanError
from roundelay.ir.plan import Plan
from roundelay.ir.program import Channel, Port
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from tests.lower.plans import FEW, RULES, edge_of, plan_of, plans

FIRST, SECOND, THIRD = Port(0, 0), Port(1, 1), Port(2, 2)
SKIP = edge_of(0, 2, slots=5, gradient=False)


def test_every_edge_has_a_channel_forward_and_one_back_if_a_gradient_travels() -> None:
    assert channels_of(read(plan_of("1f1b", 3, 4, skips=[SKIP]))) == (
        Channel(0, "forward", (FIRST,), (SECOND,), 2),
        Channel(1, "gradient", (SECOND,), (FIRST,), 2),
        Channel(2, "forward", (FIRST,), (THIRD,), 5),
        Channel(3, "forward", (SECOND,), (THIRD,), 2),
        Channel(4, "gradient", (THIRD,), (SECOND,), 2),
    )


def test_a_program_in_the_middle_takes_and_gives_on_both_sides() -> None:
    assert str(emit(read(plan_of("1f1b", 3, 4)))[1]).splitlines() == [
        "worker 1 of 3",
        "loop every 1 over batch",
        "tapes 2",
        "channel 0 forward 0.0>1.1 slots 2",
        "channel 1 gradient 1.1>0.0 slots 2",
        "channel 2 forward 1.1>2.2 slots 2",
        "channel 3 gradient 2.2>1.1 slots 2",
        "body",
        "  forward 1 g+1 takes 0 gives 2 mode stash",
        "  backward 1 g takes 3 gives 1 weights forward mode stash",
        "  update 1 g",
    ]


def test_an_edge_that_skips_is_taken_where_it_ends_and_nowhere_else() -> None:
    programs = emit(read(plan_of("1f1b", 3, 4, skips=[SKIP])))
    assert [[c.id for c in program.channels] for program in programs] == [[0, 1, 2], [0, 1, 3, 4], [2, 3, 4]]
    forwards, backwards = ([p.body[-3 + i] for p in programs] for i in (0, 1))
    assert [forward.gives for forward in forwards] == [(0, 2), (3,), ()]
    assert [forward.takes for forward in forwards] == [(), (0,), (2, 3)]
    assert [backward.takes for backward in backwards] == [(1,), (4,), ()]


@FEW
@given(plans())
def test_only_the_first_worker_reads_and_every_body_ends_with_its_update(plan: Plan) -> None:
    for program in emit(read(plan)):
        assert program.registers == (2 if program.worker == 0 else 0)
        opcodes = [i.opcode for i in program.body if i.opcode != "backward-weight"]
        ahead = ["read", "forward"] if program.worker == 0 else ["forward"]
        assert opcodes == [*ahead, "backward", "update"]


@FEW
@given(plans())
def test_forwards_are_ahead_by_the_schedule_s_lag_and_weight_halves_late_by_its_delay(plan: Plan) -> None:
    window = read(plan).schedule.window
    for k, program in enumerate(emit(read(plan))):
        lag = plan.micro_batches if plan.rule == "gpipe" else plan.num_stages - 1 - k
        assert (program.worker, program.num_workers, program.every) == (k, plan.num_stages, 1)
        assert (program.stages, program.over) == ((k,), window)
        assert {i.offset for i in program.body if i.opcode in ("read", "forward")} == {lag}
        assert {i.offset for i in program.body if i.opcode == "backward"} == {0}
        late = {i.offset for i in program.body if i.opcode in ("backward-weight", "update")}
        assert late == {-k if plan.rule == "zb-h1" else 0}


def test_a_program_of_halves_owes_as_many_as_its_stage_s_number_and_one() -> None:
    first, middle, last = emit(read(plan_of("zb-h1", 3, 4)))
    assert [program.owed for program in (first, middle, last)] == [1, 2, 3]
    assert str(middle).splitlines()[8:] == [
        "body",
        "  forward 1 g+1 takes 0 gives 2 mode stash",
        "  backward 1 g takes 3 gives 1 weights forward mode stash",
        "  backward-weight 1 g-1",
        "  update 1 g-1",
    ]
    assert [i.offset for i in last.body] == [0, 0, -2, -2]


@FEW
@given(plans())
def test_every_channel_has_one_giver_and_one_taker(plan: Plan) -> None:
    programs = emit(read(plan))
    for channel in channels_of(read(plan)):
        givers = {p.worker for p in programs for i in p.body if channel.id in i.gives}
        takers = {p.worker for p in programs for i in p.body if channel.id in i.takes}
        ends = [port.worker for port in (*channel.sources, *channel.targets)]
        assert (givers, takers) == ({ends[0]}, {ends[1]})
        assert [p.worker for p in programs if channel in p.channels] == sorted(ends)
        opcodes = {i.opcode for p in programs for i in p.body if channel.id in (*i.gives, *i.takes)}
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
    assert [program.tapes for program in emit(read(plan_of(rule, 4, micro_batches)))] == tapes


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
    for program in emit(read(plan_of(rule, 3, 2, backward=backward))):
        passes = [i for i in program.body if i.opcode in ("forward", "backward")]
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
    programs = emit(read(plan_of(rule, 3, 1, predictor=predictor)))
    forwards = [{i.distance for i in p.body if i.opcode == "forward"} for p in programs]
    assert forwards == [{text} for text in distances]
    assert {i.distance for p in programs for i in p.body if i.opcode != "forward"} == {""}


@pytest.mark.parametrize("rule", RULES)
def test_one_stage_alone_needs_no_channels(rule: str) -> None:
    (program,) = emit(read(plan_of(rule, 1, 3)))
    assert program.channels == ()
    assert all((i.takes, i.gives) == ((), ()) for i in program.body)


@FEW
@given(plans())
def test_times_and_bytes_change_no_program(plan: Plan) -> None:
    stages = tuple(replace(s, forward_s=9.0, tape_bytes=1) for s in plan.stages)
    slower = replace(plan, latency_s=3.0, read_s=2.0, stages=stages)
    assert emit(read(slower)) == emit(read(plan))


def test_a_plan_of_an_unknown_rule_has_no_programs() -> None:
    with pytest.raises(PlanError, match="the update rule"):
        emit(read(replace(plan_of("1f1b", 2, 2), rule="2f2b")))
