"""How much is in flight where the order is free: numbers worked out by hand, and the rate that they give.

The link: 100 Mbit/s, 40 ms there and back. A stage computes for 20 ms, a message has 64 KiB: 40 + 2 · 5.24 = 50.5 ms,
as long as 2.52 stages compute, so ⌈2.52 + 1⌉ = 4 slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import EdgePlan, Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planner.free_order import with_capacities
from roundelay.simulator import Simulation, simulate
from tests.lower.plans import edge_of, plan_of

KIB64 = 1 << 16
COMPUTE_S = 0.02


def wide_area(stages: int = 3, size: int = KIB64, compute_s: float = COMPUTE_S, skips: Sequence[EdgePlan] = ()) -> Plan:
    """A chain over the link, with or without edges that skip stages."""
    plan = plan_of("ravnest", stages, 1, latency_s=0.02, bytes_per_s=12.5e6, skips=skips)
    return replace(
        plan,
        stages=tuple(replace(s, forward_s=0.4 * compute_s, backward_s=0.6 * compute_s) for s in plan.stages),
        edges=tuple(replace(e, forward_bytes=size, backward_bytes=size) for e in plan.edges),
    )


def slots(plan: Plan) -> dict[tuple[int, int], int]:
    """By ends of the edge."""
    return {(edge.source, edge.target): edge.slots for edge in plan.edges}


def in_flight(plan: Plan) -> list[int]:
    """Of each stage."""
    return [stage.in_flight for stage in plan.stages]


def with_counts(plan: Plan, own_slots: int, counts: Sequence[int]) -> Plan:
    """The plan with other numbers."""
    stages = [replace(stage, in_flight=count) for stage, count in zip(plan.stages, counts, strict=True)]
    return replace(plan, edges=tuple(replace(e, slots=own_slots) for e in plan.edges), stages=tuple(stages))


# --- by hand


def test_a_link_has_a_slot_for_each_interval_in_its_way_there_and_back() -> None:
    plan = with_capacities(wide_area())
    assert slots(plan) == {(0, 1): 4, (1, 2): 4}


def test_so_many_forwards_are_in_flight_as_fit_into_the_way_to_the_end_and_back() -> None:
    """1 + stages behind + ⌈way / 20 ms⌉: from stage 0 5.05 intervals, from stage 1 2.52; none at the last."""
    assert in_flight(with_capacities(wide_area())) == [1 + 2 + 6, 1 + 1 + 3, 1]


def test_the_slowest_stage_with_its_update_is_the_interval() -> None:
    plan = wide_area()
    slow = replace(plan.stages[1], forward_s=0.01, backward_s=0.03, update_s=0.02)
    changed = with_capacities(replace(plan, stages=(plan.stages[0], slow, plan.stages[2])))
    assert slots(changed) == {(0, 1): 2, (1, 2): 2}  # 50.5 of 60 ms
    assert in_flight(changed) == [1 + 2 + 2, 1 + 1 + 1, 1]


def test_an_edge_s_own_link_counts() -> None:
    plan = wide_area()
    near = replace(plan.edges[0], latency_s=0.001, bytes_per_s=1e9)
    changed = with_capacities(replace(plan, edges=(near, plan.edges[1])))
    assert slots(changed) == {(0, 1): 2, (1, 2): 4}  # 2.1 ms, and 50.5 as before
    assert in_flight(changed) == [1 + 2 + 3, 1 + 1 + 3, 1]


def test_a_link_of_no_time_has_two_slots_and_one_of_a_whole_interval_three() -> None:
    plan = with_capacities(replace(wide_area(size=0), latency_s=0.0))
    assert (slots(plan), in_flight(plan)) == ({(0, 1): 2, (1, 2): 2}, [4, 3, 1])
    plan = with_capacities(replace(wide_area(size=0), latency_s=0.01))
    assert (slots(plan), in_flight(plan)) == ({(0, 1): 3, (1, 2): 3}, [5, 3, 1])


def test_where_seconds_are_unknown_messages_take_next_to_none() -> None:
    plan = with_capacities(wide_area(compute_s=0.0))
    assert (slots(plan), in_flight(plan)) == ({(0, 1): 2, (1, 2): 2}, [4, 3, 1])


def test_an_edge_that_skips_stages_has_the_slots_of_the_edges_that_it_skips() -> None:
    """Else its messages would fill it while the others are still on their way."""
    plan = with_capacities(wide_area(4, skips=[edge_of(0, 2), edge_of(0, 3)]))
    assert slots(plan) == {(0, 1): 4, (1, 2): 4, (2, 3): 4, (0, 2): 8, (0, 3): 12}
    assert in_flight(plan) == [1 + 3 + 8, 1 + 2 + 6, 1 + 1 + 3, 1]


def test_an_edge_that_is_slower_than_what_it_skips_keeps_its_own() -> None:
    plan = wide_area(skips=[edge_of(0, 2)])
    slow = [replace(e, latency_s=0.5, bytes_per_s=1e9) if (e.source, e.target) == (0, 2) else e for e in plan.edges]
    changed = with_capacities(replace(plan, edges=tuple(slow)))
    assert slots(changed)[0, 2] == 1 + 51  # 1000.13 ms
    assert in_flight(changed) == [1 + 2 + 51, 5, 1]


def test_one_stage_has_one_in_flight() -> None:
    assert in_flight(with_capacities(wide_area(1))) == [1]


@pytest.mark.parametrize("rule", ["pipedream", "1f1b"])
def test_a_plan_with_an_order_stays_as_it_is(rule: str) -> None:
    plan = plan_of(rule, 3, 1, latency_s=1.0)
    assert with_capacities(plan) is plan


# --- the rate


def simulated(plan: Plan, count: int = 300) -> Simulation:
    """A run."""
    return simulate(plan, emit(read(plan)), stream([1] * count))


def share(plan: Plan, count: int = 300) -> float:
    """Updates per second, as a share of what a stage could do alone."""
    return count * COMPUTE_S / simulated(plan, count).makespan_s


def test_with_these_numbers_a_wide_area_link_leaves_no_stage_idle() -> None:
    plan = with_capacities(wide_area())
    assert share(plan) >= 0.9
    busy = [worker.busy_s for worker in simulated(plan).workers]
    assert min(busy) >= 0.9 * simulated(plan).makespan_s


def test_with_the_paper_s_single_slot_stages_wait_most_of_the_time() -> None:
    plan = wide_area()
    assert share(with_counts(plan, 1, [9, 5, 1])) < 0.35
    assert share(with_counts(plan, 1, [3, 2, 1])) < 0.35
    shares = [share(with_counts(plan, count, [9, 5, 1])) for count in (1, 2, 4, 8)]
    assert shares == sorted(shares)
    assert shares[1] < 0.7
    assert shares[3] - shares[2] < 0.05, "more than the rule's gains nothing"


def test_with_fewer_in_flight_stages_wait_and_more_gain_nothing() -> None:
    plan = wide_area()
    assert share(with_counts(plan, 4, [6, 4, 1])) < 0.9
    assert share(with_counts(plan, 4, [18, 10, 1])) - share(with_counts(plan, 4, [9, 5, 1])) < 0.02


def test_staleness_grows_towards_the_first_stage_and_is_none_at_the_last() -> None:
    """Figure 3: what a backward's weights lack of the newest, in updates."""
    plan = with_capacities(wide_area(4))
    run, most = simulated(plan), []
    for worker in range(4):
        own = [i for i in run.intervals_of(worker) if i.opcode in ("forward", "backward")]
        read_by = {i.g: i.reads for i in own if i.opcode == "forward"}
        most.append(max(i.version - read_by[i.g] for i in own if i.opcode == "backward"))
    assert most == sorted(most, reverse=True)
    assert most[-1] == 0
    assert all(stale <= stage.in_flight - 1 for stale, stage in zip(most, plan.stages, strict=True))
