"""Interleaved 1F1B, from the body of its loop to bit-equal runs: D workers with two stages each, M micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from roundelay.errors import PlanError
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planner.prove_plan import prove
from roundelay.schedules import SCHEDULES, actions
from roundelay.simulator import Simulation, simulate
from tests.equivalence.cells import OPTIMIZERS, VARIANTS, assert_same, bench, trained
from tests.lower.plans import by_rule, plan_of

RULE = "interleaved-1f1b"
INTERLEAVED = SCHEDULES[RULE]


def plan_with(workers: int, micro_batches: int, *, slots: int = 2) -> Plan:
    """Equal stages, a forward and a backward of a second each on either of a worker's stages."""
    plan = plan_of(RULE, 2 * workers, micro_batches, slots=slots)
    return replace(plan, stages=tuple(replace(s, forward_s=1.0, backward_s=1.0) for s in plan.stages))


def sim(plan: Plan, counts: Sequence[int]) -> Simulation:
    return simulate(plan, emit(read(plan)), stream(list(counts)))


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (0, "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 u0 B2 B3 U0"),
        (1, "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 u0 B2 B3 U0"),
    ],
)
def test_the_order_of_four_micro_batches_on_two_workers(worker: int, expected: str) -> None:
    acts = actions(INTERLEAVED, (worker, 2 + worker), 4, [4])
    assert " ".join(f"{a.kind if a.stage < 2 else a.kind.lower()}{a.number}" for a in acts) == expected


def test_a_program_is_one_turn_of_as_many_micro_batches_as_there_are_workers() -> None:
    program = emit(read(plan_with(2, 4)))[1]
    assert str(program).splitlines()[:3] == ["worker 1 of 2", "loop every 2 over batch", "tapes 3"]
    assert [(i.opcode, i.stage, i.offset) for i in program.body if i.opcode != "update"] == [
        ("forward", 3, 0),
        ("backward", 3, 0),
        ("forward", 3, 1),
        ("backward", 3, 1),
        ("forward", 1, 2),
        ("backward", 1, 0),
        ("forward", 1, 3),
        ("backward", 1, 1),
    ]


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_the_bubble_is_the_published_one(workers: int, micro_batches: int) -> None:
    """(D - 1) (f + b) of a stage's own times, half of what 1F1B loses with stages twice as long (Megatron-LM, 2.2)."""
    both = 2 * (1.0 + 1.0) * micro_batches
    assert sim(plan_with(workers, micro_batches), [micro_batches]).makespan_s == both + (workers - 1) * 2.0
    whole = plan_of("1f1b", workers, micro_batches)
    doubled = replace(whole, stages=tuple(replace(s, forward_s=2.0, backward_s=2.0) for s in whole.stages))
    assert sim(doubled, [micro_batches]).makespan_s == both + (workers - 1) * 4.0


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 1), (2, 3), (2, 4), (3, 5), (3, 8), (4, 3), (4, 8)])
@pytest.mark.parametrize("clip", ["none", "previous:1", "global:1"])
def test_a_plan_is_proved_whatever_its_batches_leave_over(sizes: tuple[int, int], clip: str) -> None:
    prove(replace(plan_with(*sizes), clip=Clip.parse(clip)))


@pytest.mark.parametrize("stages", [2, 4, 6])
@pytest.mark.parametrize("model", ["mlp", "batchnorm", "tied_head", "skip"])
def test_it_equals_the_reference_and_trains_as_1f1b_does(model: str, stages: int) -> None:
    place = bench(model)
    for variant, micro_batches in ((RULE, 4), (RULE, 3), (f"{RULE} recompute", 2)):
        plan = place.plan(VARIANTS[variant], stages, micro_batches)
        found = place.verify(plan, place.job(OPTIMIZERS["adamw"]))
        assert found.equal, found.difference
        assert len(found.workers) == stages // 2
    assert_same(trained(model, RULE, stages), trained(model, "1f1b", stages))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_it_runs_in_processes_and_with_the_norm_of_all_gradients(transport: str) -> None:
    place = bench("mlp")
    plan = replace(place.plan(VARIANTS[RULE], 4, 4, transport), clip=Clip.parse("global:0.05"))
    found = place.verify(plan)
    assert found.equal, found.difference


def test_a_stage_on_the_wrong_worker_is_refused() -> None:
    with pytest.raises(PlanError, match="expected 2 for each worker, as interleaved-1f1b makes them take turns"):
        prove(replace(by_rule(plan_with(2, 4), "zb-v"), rule=RULE))
