"""How much may be in flight where the order is free (Ravnest, 2024, Algorithm 1).

A stage that waits for a slot does nothing. So an edge has as many slots as messages are sent while the first one's slot
comes back: one for each interval in its transfer and in a message there and back, and one being worked on. Where these
are a whole number of intervals there is one more, or a message that waits behind a backward leaves a stage idle. The
paper has one slot, which leaves it idle for all of that time.

An interval is that of the busiest: a machine that computes, or its line, which all its messages of one direction share.

A stage goes on until it has as many forwards in flight as fit into the way to the last stage and back. More would read
weights that are older still, and gain nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from roundelay.ir.plan import EdgePlan, Plan
from roundelay.lower.reading import read


def with_capacities(plan: Plan) -> Plan:
    """The plan with slots for its links and how many forwards each stage may have in flight, if its order is free.

    Where seconds are not known yet, messages take next to none.
    """
    if not read(plan).free:
        return plan
    interval_s = _interval_s(plan)
    slots: dict[tuple[int, int], int] = {}
    way_s, behind = [0.0] * plan.num_stages, [0] * plan.num_stages
    for edge in sorted(plan.edges, key=lambda edge: (-edge.source, edge.target)):
        round_s = _round_s(plan, edge)
        own = 2 + (math.floor(round_s / interval_s) if interval_s else 0)
        slots[edge.source, edge.target] = own
        way_s[edge.source] = max(way_s[edge.source], round_s + way_s[edge.target])
        behind[edge.source] = max(behind[edge.source], 1 + behind[edge.target])
    passed = {ends: _slots_on_way(slots, *ends) for ends in slots}
    in_flight = [
        1 + count + (max(1, math.ceil(seconds / interval_s)) if interval_s else 1) if count else 1
        for seconds, count in zip(way_s, behind, strict=True)
    ]
    return replace(
        plan,
        edges=tuple([replace(e, slots=passed[e.source, e.target]) for e in plan.edges]),
        stages=tuple([replace(s, in_flight=count) for s, count in zip(plan.stages, in_flight, strict=True)]),
    )


def _interval_s(plan: Plan) -> float:
    """Seconds between two updates: what the slowest machine computes, or its line carries in one direction; or 0."""
    carried = dict.fromkeys(product(range(plan.num_stages), ("in", "out")), 0.0)
    for edge in plan.edges:
        _, bytes_per_s = _link(plan, edge)
        for ends, num_bytes in (
            ((edge.source, edge.target), edge.forward_bytes),
            ((edge.target, edge.source), edge.backward_bytes),
        ):
            carried[ends[0], "out"] += num_bytes / bytes_per_s
            carried[ends[1], "in"] += num_bytes / bytes_per_s
    speeds = [plan.workers[plan.worker_of(stage)].speed for stage in range(plan.num_stages)]
    computed = [(s.forward_s + s.backward_s + s.update_s) / speed for s, speed in zip(plan.stages, speeds, strict=True)]
    return max(*computed, *carried.values()) if any(computed) else 0.0


def _link(plan: Plan, edge: EdgePlan) -> tuple[float, float]:
    """Seconds of an empty message, and bytes per second."""
    return (edge.latency_s, edge.bytes_per_s) if edge.bytes_per_s else (plan.latency_s, plan.bytes_per_s)


def _round_s(plan: Plan, edge: EdgePlan) -> float:
    """Seconds of a message there and one back, and of their transfer."""
    latency_s, bytes_per_s = _link(plan, edge)
    return 2 * latency_s + (edge.forward_bytes + edge.backward_bytes) / bytes_per_s


def _slots_on_way(slots: dict[tuple[int, int], int], source: int, target: int) -> int:
    """Slots of an edge: as many as those have together on whose way it passes stages by."""
    longest = {source: 0}
    for (start, end), own in sorted(slots.items()):
        if start in longest and end <= target and (start, end) != (source, target):
            longest[end] = max(longest.get(end, 0), longest[start] + own)
    return max(slots[source, target], longest.get(target, 0))
