"""What no run could obey is refused before one begins, and what a run did is held against the rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import EdgePlan, Plan
from roundelay.ir.stage import Partition
from roundelay.lower.emit import emit
from roundelay.lower.partition import partition
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_fit, check_plan
from roundelay.lower.verify_schedule import Fired, check_registers, check_run, runs_to_check, updates_before
from roundelay.schedules import SCHEDULES, actions
from tests.actor.drive import World, in_turn
from tests.lower.graphs import chain_of
from tests.lower.plans import FEW, RULES, counts_for, edge_of, plan_of, plans

JOBS = plans().flatmap(lambda plan: st.tuples(st.just(plan), counts_for(plan)))


def fired_in(plan: Plan, counts: list[int]) -> list[list[Fired]]:
    """What the machines of a plan fire."""
    runs = World(plan, stream(counts)).run(in_turn).runs
    return [
        [
            Fired(
                run.instruction.opcode,
                run.g,
                run.version,
                run.reads,
                run.distance,
                run.header.entry if run.header else 0,
                run.stage,
                run.instruction.of,
                run.instruction.continues,
            )
            for run in mine
        ]
        for mine in runs
    ]


# --- the plan alone


@FEW
@given(plans())
def test_a_plan_of_any_rule_and_size_is_accepted(plan: Plan) -> None:
    assert emit(check_plan(plan)) == emit(read(plan))


@pytest.mark.parametrize("predictor", ["improved", "paper", "released-code"])
@pytest.mark.parametrize("backward", ["recompute", "stash", "mixed"])
def test_pipeoptim_has_three_predictors_and_three_modes(predictor: str, backward: str) -> None:
    check_plan(plan_of("pipeoptim", 2, 1, predictor=predictor, backward=backward))


@pytest.mark.parametrize(
    ("rule", "field", "wrong"),
    [
        ("pipeoptim", "predictor", "none"),
        ("pipeoptim", "predictor", "guess"),
        ("1f1b", "predictor", "improved"),
        ("pipedream", "backward", "recompute"),
        ("pipeoptim", "backward", "guess"),
        ("1f1b", "transport", "pigeon"),
        ("1f1b", "micro_batches", 0),
        ("1f1b", "deadline_s", 0.0),
        ("1f1b", "bytes_per_s", 0.0),
        ("1f1b", "format", 0),
    ],
)
def test_a_field_that_no_run_could_obey_is_refused_by_name(rule: str, field: str, wrong: Any) -> None:
    with pytest.raises(PlanError) as refusal:
        check_plan(replace(plan_of(rule, 2, 2), **{field: wrong}))
    assert refusal.value.subject == f"{field} of the plan"
    assert str(wrong) in refusal.value.got


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(PlanError, match="the update rule"):
        check_plan(replace(plan_of("1f1b", 2, 2), rule="2f2b"))


@pytest.mark.parametrize(
    ("edges", "why"),
    [
        ([(0, 1), (1, 3)], "from stage 1 to stage 3"),
        ([(0, 1), (2, 1)], "from stage 2 to stage 1"),
        ([(0, 1), (1, 1)], "from stage 1 to stage 1"),
        ([(0, 1), (0, 2)], r"no edge \(1, 2\)"),
        ([], r"no edge \(0, 1\)"),
        ([(0, 1), (1, 2), (1, 2)], "an edge given twice"),
        ([(0, 2), (0, 1), (1, 2), (0, 2)], "an edge given twice"),
    ],
)
def test_edges_that_do_not_join_the_stages_are_refused(edges: list[tuple[int, int]], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        check_plan(plan_of("1f1b", 3, 2, edges=tuple(edge_of(*pair) for pair in edges)))


def test_an_edge_without_slots_is_refused_by_its_place() -> None:
    with pytest.raises(PlanError, match=r"edges\[1\]\.slots of the plan: got 0"):
        check_plan(plan_of("1f1b", 3, 2, edges=(edge_of(0, 1), edge_of(1, 2, slots=0))))


# --- the plan and the model

STAGES = [["a0"], ["a1"], ["a2"]]
PARTS: Partition = partition(chain_of(3), STAGES)
EDGES = (edge_of(0, 1), edge_of(0, 2, gradient=False), edge_of(1, 2))


def test_a_plan_with_the_edges_that_its_cuts_need_fits() -> None:
    check_fit(plan_of("1f1b", 3, 2, edges=EDGES), "a model", PARTS)


def test_a_plan_for_another_model_does_not_fit() -> None:
    with pytest.raises(PlanError, match=r"the plan's model: got fingerprint a model; expected another model"):
        check_fit(plan_of("1f1b", 3, 2, edges=EDGES), "another model", PARTS)


@pytest.mark.parametrize(
    "edges",
    [
        (EDGES[0], EDGES[2]),
        (EDGES[0], edge_of(0, 2, gradient=True), EDGES[2]),
        (edge_of(0, 1, gradient=False), *EDGES[1:]),
    ],
    ids=["lacking", "with a gradient too many", "without a gradient"],
)
def test_a_plan_with_other_edges_than_its_cuts_need_does_not_fit(edges: tuple[EdgePlan, ...]) -> None:
    with pytest.raises(PlanError) as refusal:
        check_fit(plan_of("1f1b", 3, 2, edges=edges), "a model", PARTS)
    assert refusal.value.expected == "0>1, 0>2 (nothing back), 1>2, which its cuts need"


# --- a run


@FEW
@given(JOBS)
def test_what_the_machines_do_is_what_the_rule_says(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    check_run(read(plan), counts, fired_in(plan, counts))


@pytest.mark.parametrize("rule", RULES)
def test_a_stage_s_actions_in_another_order_are_refused(rule: str) -> None:
    plan = plan_of(rule, 3, 2)
    fired = fired_in(plan, [2, 2])
    mine = [f for f in fired[1] if f.opcode != "read"]
    for i in range(len(mine) - 1):
        swapped = [*mine[:i], mine[i + 1], mine[i], *mine[i + 2 :]]
        with pytest.raises(PlanError, match=rf"worker 1, action {i}"):
            check_run(read(plan), [2, 2], [fired[0], swapped, fired[2]])


@pytest.mark.parametrize("rule", RULES)
def test_an_action_too_few_or_too_many_is_refused(rule: str) -> None:
    plan = plan_of(rule, 2, 2)
    fired = fired_in(plan, [2])
    end = len(fired[1]) - 1
    with pytest.raises(PlanError, match=f"worker 1, action {end}: got the end; expected 1U0"):
        check_run(read(plan), [2], [fired[0], fired[1][:-1]])
    with pytest.raises(PlanError, match=f"worker 1, action {end + 1}: got 1U0; expected the end"):
        check_run(read(plan), [2], [fired[0], [*fired[1], fired[1][-1]]])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("opcode", ["forward", "backward"])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_version_other_than_the_rule_s_is_refused_with_its_micro_batch(rule: str, opcode: str, wrong: int) -> None:
    plan, counts = plan_of(rule, 3, 2), [2, 2, 2]
    fired = fired_in(plan, counts)
    at = next(i for i, f in enumerate(fired[1]) if (f.opcode, f.g) == (opcode, 3))
    fired[1][at] = replace(fired[1][at], version=fired[1][at].version + wrong)
    with pytest.raises(PlanError, match=f"stage 1, {opcode} of micro-batch 3: got version {fired[1][at].version}"):
        check_run(read(plan), counts, fired)


@FEW
@given(
    st.sampled_from([s for s in SCHEDULES.values() if s.stages_per_worker == 1 and not s.free]),
    st.integers(1, 6).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size))),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_updates_before_a_forward_are_those_in_the_schedule(
    schedule: Any, place: tuple[int, int], counts: list[int]
) -> None:
    stage, num_stages = place
    done = 0
    for act in actions(schedule, [stage], num_stages, counts):
        if act.kind == "F":
            assert updates_before(schedule, stage, num_stages, counts, act.number) == done
        done += act.kind == "U"


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_the_runs_to_prove_end_everywhere_and_hold_short_batches(num_stages: int, micro_batches: int) -> None:
    """In any place of a batch, with the pipeline half full, just full, and full for a while."""
    runs = runs_to_check(read(plan_of("pipedream", num_stages, micro_batches)))
    totals = {sum(counts) for counts in runs}
    assert set(range(1, num_stages * micro_batches + 1)) <= totals
    assert max(totals) > 2 * num_stages * micro_batches - micro_batches
    assert all(1 <= count <= micro_batches for counts in runs for count in counts)
    assert any(counts[i] < micro_batches for counts in runs for i in range(len(counts) - 1)) == (micro_batches > 1)


# --- registers


def test_as_many_tapes_and_messages_as_there_is_room_for_are_allowed() -> None:
    programs = emit(read(plan_of("1f1b", 2, 4)))
    check_registers(programs, [2, 1], [0, 0], [{1: 2}, {0: 2}], [2, 0])


@pytest.mark.parametrize(
    ("tapes", "unread", "where"),
    [
        ([3, 1], [{1: 2}, {0: 2}], "tapes of worker 0: got 3; expected at most 2"),
        ([2, 2], [{1: 2}, {0: 2}], "tapes of worker 1: got 2; expected at most 1"),
        ([2, 1], [{1: 3}, {0: 2}], "slots of channel 1 into worker 0: got 3; expected at most 2"),
        ([2, 1], [{1: 2}, {0: 3}], "slots of channel 0 into worker 1: got 3; expected at most 2"),
    ],
)
def test_a_register_that_overflows_is_refused(tapes: list[int], unread: list[dict[int, int]], where: str) -> None:
    with pytest.raises(PlanError, match=where):
        check_registers(emit(read(plan_of("1f1b", 2, 4))), tapes, [0, 0], unread, [2, 0])


@pytest.mark.parametrize(
    ("data", "where"),
    [([3, 0], "worker 0: got 3; expected at most 2"), ([2, 1], "worker 1: got 1; expected at most 0")],
)
def test_no_worker_holds_more_batches_than_it_has_registers(data: list[int], where: str) -> None:
    with pytest.raises(PlanError, match=f"registers of {where}"):
        check_registers(emit(read(plan_of("1f1b", 2, 4))), [2, 1], [0, 0], [{1: 2}, {0: 2}], data)


def test_no_more_backwards_may_wait_for_their_second_half_than_the_program_says() -> None:
    programs = emit(read(plan_of("zb-h1", 2, 4)))
    check_registers(programs, [2, 1], [1, 2], [{1: 2}, {0: 2}], [2, 0])
    with pytest.raises(PlanError, match="worker 1 whose second half is pending: got 3; expected at most 2"):
        check_registers(programs, [2, 1], [1, 3], [{1: 2}, {0: 2}], [2, 0])


@pytest.mark.parametrize("rule", ["zb-h1", "zb-v"])
def test_what_halves_cannot_do_is_refused(rule: str) -> None:
    with pytest.raises(PlanError, match=f"compile of the plan.*{rule}"):
        check_plan(plan_of(rule, 2, 4, compile=True))
    check_plan(plan_of(rule, 2, 4, clip="global:1.0", precision="bf16"))


def test_the_norm_of_gradients_that_are_not_whole_is_refused() -> None:
    plan, counts = plan_of("zb-h1", 2, 3, clip="previous:1.0"), [3, 1]
    done = fired_in(plan, counts)
    check_run(read(plan), counts, done)
    acts = [(f.opcode, f.g) for f in done[1]]
    assert acts[-3:] == [("backward-weight", 3), ("grad-norm-sq", 3), ("update", 3)]
    early, late = [*done[1][:-3], done[1][-2], done[1][-3], done[1][-1]], [*done[1][:-2], done[1][-1], done[1][-2]]
    with pytest.raises(PlanError, match="stage 1, grad-norm-sq after micro-batch 3: got no backward-weight"):
        check_run(read(plan), counts, [done[0], early])
    with pytest.raises(
        PlanError, match="stage 1, update after micro-batch 3: got no grad-norm-sq of that micro-batch before it"
    ):
        check_run(read(plan), counts, [done[0], late])


def test_two_workers_of_one_name_are_refused() -> None:
    plan = plan_of("1f1b", 2, 2)
    with pytest.raises(PlanError, match="the name w0 twice"):
        check_plan(replace(plan, workers=(plan.workers[0], plan.workers[0])))
