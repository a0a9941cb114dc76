"""What may be in flight where the order is free: by the busiest machine or line; the numbers are counted by hand."""

from __future__ import annotations

from dataclasses import replace

from roundelay.ir.plan import Plan
from roundelay.planner.free_order import with_capacities
from tests.lower.plans import plan_of


def planned(compute_s: float, message_s: float, latency_s: float, speeds: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Plan:
    """Three stages that compute so long for a micro-batch, and send messages that travel so long."""
    plan = plan_of("ravnest", 3, 1, latency_s=latency_s, bytes_per_s=1e6)
    size = round(1e6 * message_s)
    stages = [replace(stage, forward_s=compute_s, backward_s=0.0, update_s=0.0) for stage in plan.stages]
    edges = [replace(edge, forward_bytes=size, backward_bytes=size) for edge in plan.edges]
    workers = [replace(worker, speed=speed) for worker, speed in zip(plan.workers, speeds, strict=True)]
    return with_capacities(replace(plan, stages=tuple(stages), edges=tuple(edges), workers=tuple(workers)))


def capacities(plan: Plan) -> tuple[list[int], list[int]]:
    """Slots of the edges, and forwards in flight of the stages."""
    return [edge.slots for edge in plan.edges], [stage.in_flight for stage in plan.stages]


def test_as_many_as_the_stages_compute_while_a_message_goes_there_and_back() -> None:
    assert capacities(planned(compute_s=20.0, message_s=0.0, latency_s=20.0)) == ([4, 4], [7, 4, 1])


def test_a_line_that_is_slower_than_the_stages_is_filled_and_no_more() -> None:
    """The middle machine gets and sends two messages for each update: one in two seconds, whatever is computed."""
    assert capacities(planned(compute_s=1e-3, message_s=1.0, latency_s=0.0)) == ([3, 3], [5, 3, 1])


def test_a_slow_machine_takes_longer_than_the_one_where_seconds_were_measured() -> None:
    slow = planned(compute_s=5.0, message_s=0.0, latency_s=20.0, speeds=(1.0, 0.25, 0.5))
    assert capacities(slow) == capacities(planned(compute_s=20.0, message_s=0.0, latency_s=20.0))
