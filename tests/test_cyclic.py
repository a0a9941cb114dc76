"""Cyclic data parallelism as schedules: the paper's Figure 1, its timing, and its Table 1, counted from programs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from roundelay.comparison.cyclic_costs import Costs, chain
from roundelay.comparison.cyclic_table import costs_of, rows
from roundelay.errors import PlanError
from roundelay.ir import rule as rules
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import STATES, SUMS, Program
from roundelay.ir.rule import rule_named
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planner.prove_plan import prove
from roundelay.schedule_grid import legend, staircase
from roundelay.schedules import StateRoute, holders_of
from roundelay.simulator import Interval, Simulation, held_by_stage, simulate

SIZES = range(2, 9)
RULES = ("cdp-v1", "cdp-v2")

DATA_PARALLEL = """\
worker 0 |0F0  1F0  2F0  2B0  1B0  0B0' 0F3  1F3  2F3  2B3  1B3  0B3'
worker 1 |0F1  1F1  2F1  2B1  1B1  0B1' 0F4  1F4  2F4  2B4  1B4  0B4'
worker 2 |0F2  1F2  2F2  2B2  1B2  0B2' 0F5  1F5  2F5  2B5  1B5  0B5'"""

CYCLIC_V1 = """\
worker 0 |0F0  1F0  2F0  2B0  1B0  0B0  0F3  1F3  2F3  2B3' 1B3' 0B3'  ·    ·    ·    ·
worker 1 | ·    ·   0F1  1F1  2F1  2B1  1B1  0B1  0F4  1F4  2F4  2B4' 1B4' 0B4'  ·    ·
worker 2 | ·    ·    ·    ·   0F2  1F2  2F2  2B2  1B2  0B2  0F5  1F5  2F5  2B5' 1B5' 0B5'"""

CYCLIC_V2 = """\
worker 0 |0F0  1F0  2F0  2B0  1B0  0B0  0F3  1F3' 2F3  2B3  1B3' 0B3'  ·    ·    ·    ·
worker 1 | ·    ·   0F1  1F1  2F1  2B1  1B1  0B1  0F4' 1F4' 2F4  2B4  1B4  0B4'  ·    ·
worker 2 | ·    ·    ·    ·   0F2  1F2  2F2  2B2  1B2  0B2' 0F5' 1F5' 2F5  2B5  1B5  0B5'"""

SECOND_WORKER = """\
worker 1 of 3
loop every 1 over slots
tapes 3
channel 0 data 0.0>1.0 slots 2
channel 4 partial 0.0>1.0 slots 1
channel 5 partial 1.0>2.0 slots 1
channel 7 total 0.0>1.0 slots 1
channel 8 partial 0.1>1.1 slots 1
channel 9 partial 1.1>2.1 slots 1
channel 10 total 2.1>1.1 slots 1
channel 12 partial 0.2>1.2 slots 1
channel 13 partial 1.2>2.2 slots 1
channel 15 total 0.2>1.2 slots 1
body
  read 0 g takes 0
  forward 0 g reads p mode stash
  share 1 g-1 takes 10
  update 1 g-1
  forward 1 g mode stash
  share 2 g-1 takes 15
  update 2 g-1
  forward 2 g mode stash
  backward 2 g weights forward mode stash
  sum 2 g takes 12 gives 13
  backward 1 g weights forward mode stash
  sum 1 g takes 8 gives 9
  backward 0 g weights forward mode stash
  sum 0 g takes 4 gives 5
  share 0 g-1 takes 7
  update 0 g-1
"""


def form(layout: str, rule: str, size: int, stages: int | None = None) -> Plan:
    """A chain of equal stages in a layout with N micro-batches."""
    numbers = {"replicas": size} if layout in ("dp", "zero") else {"micro_batches": size}
    return chain(stages or size, layout=layout, rule=rule, **numbers)


def run_of(plan: Plan, batches: int = 6) -> Simulation:
    return simulate(plan, emit(read(plan)), stream([plan.micro_batches] * batches))


@pytest.mark.parametrize(("rule", "figure"), [("1f1b", DATA_PARALLEL), ("cdp-v1", CYCLIC_V1), ("cdp-v2", CYCLIC_V2)])
def test_the_papers_figure_1(rule: str, figure: str) -> None:
    plan = form("dp", rule, 3)
    assert staircase(plan, 2) == figure
    assert "1F0: forward of micro-batch 0 on stage 1" in legend(plan)


def test_a_worker_s_program_is_one_loop() -> None:
    plan = form("dp", "cdp-v2", 3)
    plan = replace(plan, edges=tuple(replace(edge, slots=3) for edge in plan.edges))
    program = emit(read(plan))[1]
    within = [str(c) for c in program.channels if c.kind in ("forward", "gradient")]
    text = "\n".join(line for line in str(program).splitlines() if line not in within)
    numbered = _numbered(text)
    assert numbered == _numbered(SECOND_WORKER)


def _numbered(text: str) -> list[str]:
    """The lines without what goes from stage to stage within the worker, channels numbered in order."""
    known: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["channel"]:
            known[words[1]] = str(len(known))
            words[1] = known[words[1]]
        for i, word in enumerate(words[:-1]):
            if word in ("takes", "gives"):
                words[i + 1] = ",".join(known[c] for c in words[i + 1].split(",") if c in known)
        kept = [w for i, w in enumerate(words) if w and not (w in ("takes", "gives") and not words[i + 1])]
        lines.append(" ".join(kept))
    return lines


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", ["single", "dp", "mp", "zero"])
def test_programs_are_read_back_as_they_print(layout: str, size: int) -> None:
    for rule in RULES:
        for program in emit(read(form(layout, rule, size, size + 1))):
            assert Program.parse(str(program)) == program


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["dp", "mp"])
def test_a_batch_takes_two_steps_for_each_stage(layout: str, size: int) -> None:
    for rule in RULES:
        assert _period(form(layout, rule, size)) == 2 * size


@pytest.mark.parametrize("size", SIZES)
def test_waiting_for_the_gradients_of_all_stages_takes_no_longer(size: int) -> None:
    assert _period(replace(form("dp", "cdp-v1", size), clip=Clip.parse("global:1"))) == 2 * size


@pytest.mark.parametrize(("size", "stages"), [(n, s) for n in (2, 3, 4, 5) for s in (1, n - 1, n, n + 1, 2 * n)])
def test_in_zero_it_takes_as_long_as_the_largest_groups_of_stages(size: int, stages: int) -> None:
    for rule in RULES:
        assert _period(form("zero", rule, size, stages)) <= 2 * size * -(-stages // size)


def _period(plan: Plan) -> float:
    """Time steps from one batch to the next, at the end of a run."""
    ends = [max(i.end_s for i in run_of(plan, n).intervals) for n in (8, 9)]
    return ends[1] - ends[0]


@pytest.mark.parametrize("size", SIZES)
def test_the_table_of_the_paper_is_what_is_counted(size: int) -> None:
    for row in rows(size):
        _agrees(costs_of(row, size), row, size)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["single", "dp", "zero"])
def test_it_is_for_sixteen_too(layout: str, rule: str) -> None:
    row = next(one for one in rows(16) if (one.choices.get("layout"), one.choices["rule"]) == (layout, rule))
    _agrees(costs_of(row, 16), row, 16)


def _agrees(costs: Costs, row: Any, size: int) -> None:
    assert costs.devices == int(row.devices)
    assert (costs.gradients, costs.messages) == (Fraction(row.gradients), Fraction(row.messages)), row.name
    assert str(costs.steps) in (row.steps, row.steps.removeprefix("ring ")) or costs.steps <= 1
    cyclic_single = row.choices.get("layout") == "single" and row.choices["rule"].startswith("cdp")
    if cyclic_single:  # backwards first: the tapes between two steps, one less than within one
        assert costs.activations == Fraction(-(-size * size // 2), size)
        assert costs.activations <= Fraction(row.activations.removeprefix("at most "))
        assert costs.parameters <= Fraction(row.parameters.removeprefix("at most "))
    else:
        assert costs.activations == Fraction(row.activations)
        told = Fraction(row.parameters.split()[0])
        expected = 2 * told if "a version" in row.parameters else told
        assert costs.parameters == (1 if "if all is split" in row.parameters else expected)


@pytest.mark.parametrize("size", SIZES)
def test_activations_of_all_workers_are_nearly_constant(size: int) -> None:
    run = run_of(form("dp", "cdp-v1", size))
    held = Counter[float]()
    for worker in range(size):
        for interval in run.intervals_of(worker):
            if interval.opcode in ("forward", "backward"):
                held[interval.start_s if interval.opcode == "forward" else interval.end_s] += (
                    1 if interval.opcode == "forward" else -1
                )
    total, steady = 0, []
    for moment in sorted(held):
        total += held[moment]
        if 2 * size * 2 <= moment < 2 * size * 5:
            steady.append(total)
    assert max(steady) == size * (size + 1) // 2  # the paper's (N + 1) / 2 of N workers
    assert max(steady) - min(steady) <= size // 2 + 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", SIZES)
def test_no_worker_of_dp_sends_or_gets_more_than_two_sums_between_two_steps(size: int, rule: str) -> None:
    plan = form("dp", rule, size)
    channels = {channel.id: channel for channel in channels_of(read(plan)) if channel.kind in SUMS}
    sent, got = Counter[tuple[int, float]](), Counter[tuple[int, float]]()
    for interval in run_of(plan).intervals:
        for number in interval.gives:
            if number in channels:
                sent[interval.worker, interval.end_s] += 1
                got[channels[number].targets[0].worker, interval.end_s] += 1
    drained = 2 * size * 5
    assert max(n for (_, moment), n in sent.items() if moment < drained) <= 2
    assert max(n for (_, moment), n in got.items() if moment < drained) <= 2


@pytest.mark.parametrize("size", SIZES)
def test_mp_needs_half_the_devices_each_with_one_micro_batch_at_a_time(size: int) -> None:
    plan = form("mp", "cdp-v2", size)
    assert plan.num_workers == size * (size + 1) // 2
    for interval in run_of(plan).intervals:
        if interval.opcode == "forward":
            holders = plan.holders(interval.stage)
            assert len(holders) == size - interval.stage == holders_of(interval.stage, size, size)
            assert interval.worker == holders[interval.g % len(holders)]
    assert all(worker.tapes_peak == 1 for worker in run_of(plan).workers)


@pytest.mark.parametrize(("size", "stages"), [(3, 3), (4, 4), (5, 5), (3, 7), (4, 3)])
def test_in_zero_a_stage_s_state_is_with_one_worker_at_a_time(size: int, stages: int) -> None:
    plan = form("zero", "cdp-v2", size, stages)
    programs, run = emit(read(plan)), run_of(plan)
    assert sorted(stage for program in programs for stage in program.holds) == list(range(stages))
    for stage in range(stages):
        here = {program.worker for program in programs if stage in program.holds}
        for interval in _of_stage(run, stage):
            if interval.opcode == "hold":
                here.add(interval.worker)
            assert here == {interval.worker}
            if interval.opcode == "pass":
                here.remove(interval.worker)


def _of_stage(run: Simulation, stage: int) -> list[Interval]:
    """What uses a stage's state, in the order of time; what takes no time is in the order of its causes."""
    used = ("forward", "backward", "sum", "share", "update", "hold", "pass")
    return [interval for interval in run.intervals if interval.stage == stage and interval.opcode in used]


@pytest.mark.parametrize("size", SIZES)
def test_in_zero_states_are_handed_on_as_often_as_the_paper_says(size: int) -> None:
    plan = form("zero", "cdp-v1", size)
    channels = {channel.id for channel in channels_of(read(plan)) if channel.kind in STATES}
    batch = [i for i in run_of(plan).intervals if i.g == 3 and set(i.gives) & channels]
    assert len(batch) == 2 * size * (size - 1)


@pytest.mark.parametrize(("size", "stages"), [(2, 2), (3, 3), (4, 4), (5, 5), (4, 2), (3, 5), (5, 4)])
@pytest.mark.parametrize("layout", ["single", "zero"])
def test_a_rule_may_read_what_the_timing_gives_and_nothing_earlier(
    layout: str, size: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_fresh(stage: int) -> int:
        if layout == "zero":
            return StateRoute(stage, stages, size).updater
        return max(0, math.ceil(size - 1 - Fraction(size * (1 + 2 * stage), 2 * stages)))

    def plan_of(earlier: int) -> Plan:
        """By a rule that reads W[t] as early as it can, and on one stage one micro-batch before that."""

        def fresh(micro_batch: int, stage: int, num_stages: int) -> bool:
            return micro_batch - 1 >= first_fresh(stage - 1) - (stage - 1 == earlier)

        name = f"own {layout} {size} {stages} {earlier}"
        monkeypatch.setattr(
            rules, "_RULES", {**rules._RULES, name: replace(rule_named("cdp-v1"), name=name, fresh=fresh)}
        )
        return form(layout, name, size, stages)

    prove(plan_of(-1))
    for stage in range(stages):
        if first_fresh(stage):
            with pytest.raises(PlanError, match=f"stage {stage}, forward of micro-batch") as refused:
                prove(plan_of(stage))
            assert f"i = {first_fresh(stage)}, j = {stage + 1} " in str(refused.value)


def says(said: object) -> Any:
    def fresh(micro_batch: int, stage: int, num_stages: int) -> Any:
        if said is ZeroDivisionError:
            raise ZeroDivisionError("a deliberate mistake")
        return said

    return fresh


@pytest.mark.parametrize(
    ("said", "told"), [("no", "'no'"), (None, "None"), (ZeroDivisionError, "ZeroDivisionError: a deliberate mistake")]
)
def test_a_table_that_says_neither_version_is_refused_by_the_rule_s_name(said: object, told: str) -> None:
    rule = replace(rule_named("cdp-v1"), name="mine", fresh=says(said))
    with pytest.raises(PlanError, match=rf"the table of rule 'mine' at \(2, 1, 3\): got {told}"):
        rule.is_fresh(2, 1, 3)


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("layout", ["single", "dp", "mp", "zero"])
def test_what_a_worker_holds_is_the_same_if_each_instruction_is_looked_at(
    layout: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = form(layout, rule, 4, 3)
    found = run_of(plan).workers
    monkeypatch.setattr(held_by_stage._HeldByStage, "is_settled", lambda *_: False)
    assert run_of(plan).workers == found
