"""What a machine's profile says of a plan: seconds of exchanges and messages, and how operations slow down together.

The former is written into the plan, whose simulation reckons with it; nothing below the plan reads a profile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from roundelay.ir.exchange import WEIGHT_GRADIENT, ExchangePlan
from roundelay.ir.graph import Op
from roundelay.ir.plan import Plan
from roundelay.planner.cluster import Cluster
from roundelay.planner.machine_profile import MachineProfile
from roundelay.schedules import PIPELINE
from roundelay.simulator.simulation import exchange_s

DIGITS = 6
"""Decimals of seconds in a plan: microseconds."""

SMALL = 5.0
"""An operation of no more than so many empty calls is small."""

LEAST_S = 1e-6
"""Seconds of an exchange that takes CPU time alone; 0 would say that they are not known."""

COPY, CALL = "copy", "call"
"""Operators: by which an exchange's tensors are put into one and taken apart; with next to nothing to compute."""


def with_costs(plan: Plan, profile: MachineProfile) -> Plan:
    """The plan with what its exchanges, messages and instructions take on a machine.

    Args:
        plan: with its exchanges and edges.
        profile: of as many workers, over its transport.
    """
    largest = max((size for edge in plan.edges for size in (edge.forward_bytes, edge.backward_bytes)), default=0)
    latency_s = profile.message_s(1) if plan.num_workers > 1 else plan.latency_s
    beyond_s = profile.message_s(largest) - latency_s if plan.num_workers > 1 else 0.0
    return replace(
        plan,
        latency_s=round(latency_s, DIGITS),
        bytes_per_s=float(round(largest / beyond_s)) if largest and beyond_s > 0 else plan.bytes_per_s,
        instruction_s=round(profile.instruction_s, DIGITS),
        exchanges=tuple([_priced(plan, exchange, profile) for exchange in plan.exchanges]),
    )


def _priced(plan: Plan, exchange: ExchangePlan, profile: MachineProfile) -> ExchangePlan:
    """The exchange with its seconds, and those in which each worker is busy with it."""
    holders, shared = plan.grid.sizes[exchange.axis], exchange.kind == WEIGHT_GRADIENT
    if not exchange.phases or holders == 1:
        return exchange
    own_s = profile.box_s + 2 * profile.operator_s(COPY, exchange.num_bytes)
    seconds = profile.exchange_s(exchange.phases, exchange.num_bytes, holders, shared=shared)
    busy_s = profile.exchange_cpu_s(exchange.phases, exchange.num_bytes, holders, shared=shared)
    busy_s = min(busy_s, seconds)
    return replace(
        exchange,
        seconds=max(LEAST_S, round(seconds - busy_s, DIGITS)),
        busy_s=round(own_s + busy_s, DIGITS),
    )


def over_links(plan: Plan, cluster: Cluster | None) -> Plan:
    """The plan with what messages and exchanges take over the links that a cluster declares; the slowest counts."""
    if cluster is None or (links := cluster.links) is None:
        return plan
    known = {worker.name: worker.node for worker in cluster.workers}
    nodes = [[known[name] for name in stage.workers] for stage in plan.stages]
    pairs: Any = zip if plan.layout == PIPELINE else product

    def rates(groups: Iterable[Collection[str]]) -> dict[str, Any]:
        link = links.within if all(len({*own}) == 1 for own in groups) else links.between
        return {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}

    def priced(exchange: ExchangePlan) -> ExchangePlan:
        groups = plan.grid.groups(exchange.axis) if exchange.phases else []
        own = replace(plan, **rates([[nodes[exchange.stage][i] for i in group] for group in groups]))
        seconds = [exchange_s(own, replace(exchange, seconds=0.0), len(group)) for group in groups if len(group) > 1]
        return replace(exchange, seconds=max(LEAST_S, round(max(seconds), DIGITS))) if seconds else exchange

    edges = [replace(edge, **rates(pairs(nodes[edge.source], nodes[edge.target]))) for edge in plan.edges]
    exchanges = tuple([priced(exchange) for exchange in plan.exchanges])
    return replace(plan, edges=tuple(edges), exchanges=exchanges, **rates([[n for own in nodes for n in own]]))


def slower(profile: MachineProfile | None, plan: Plan, op: Op | None, seconds: float) -> float:
    """How many times as long an operation takes in a plan, whose workers compute at once, as it takes alone.

    Args:
        profile: of the machine; None: as long.
        plan: with its workers.
        op: the operation; None for the loss.
        seconds: that it takes alone.
    """
    if profile is None or plan.num_workers == 1:
        return 1.0
    if seconds <= SMALL * profile.operator_s(CALL, 1):
        return profile.together["small"]
    return profile.together["matmul" if op is not None and op.flops else "elementwise"]
