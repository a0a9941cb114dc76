"""Costs of cyclic data parallelism and of what it replaces, counted from programs (Fournier, Oyallon, 2024, Table 1).

A model of N equal stages is planned in every form, and its programs are run on the simulator's clock with messages that
take no time. Counted are bytes of activations and weights that a worker holds, bytes of all messages of one batch, how
many messages must follow one another between two time steps, and workers. Nothing is computed by formula; the paper's
formulas stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from roundelay.ir.exchange import ExchangePlan, Phase, all_gather, all_reduce, reduce_scatter
from roundelay.ir.mesh import REPLICAS
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import FORMAT, EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.program import EDGES
from roundelay.ir.residence import SHARDED
from roundelay.ir.rule import NO_PREDICTOR, rule_named
from roundelay.ir.sbp import Split
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.priced_bytes import given_bytes
from roundelay.lower.reading import read
from roundelay.planner.given_layout import owners_of
from roundelay.planner.stage_counts import slots_in_layout
from roundelay.schedules import PIPELINE, schedule_for
from roundelay.simulator import Simulation, simulate

ELEMENTS, TAPE, MESSAGE = 1024, 1000, 10
"""Of each stage: parameters, and bytes of a micro-batch's activations, of which so many go on to the next stage."""

GRADIENT = "weight-gradient"

BATCHES = 5
"""Simulated; the middle one is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a form costs, in the units of the paper's Table 1.

    Args:
        activations: most on one worker, in those of a micro-batch in the whole model (B Psi_A).
        parameters: most on one worker at one time, in those of the model (Psi_P), each version counted.
        gradients: v, where all workers together send 2 (N - 1) v Psi_P bytes of gradients or of states in a batch.
        messages: w, where they send 2 N w B Psi_A^int bytes of activations and their gradients.
        steps: messages that must follow one another between two time steps.
        devices: workers.
    """

    activations: Fraction
    parameters: Fraction
    gradients: Fraction
    messages: Fraction
    steps: int
    devices: int


def chain(
    num_stages: int,
    *,
    rule: str,
    layout: str = PIPELINE,
    replicas: int = 1,
    micro_batches: int = 1,
    split_states: bool = False,
    tape: int = TAPE,
) -> Plan:
    """The plan of a model of equal stages, each of which takes a second forward and one backward.

    Args:
        num_stages: S.
        rule: update rule.
        layout: of the plan.
        replicas: of the plan.
        micro_batches: of each replica.
        split_states: whether each replica updates a part of every weight.
        tape: bytes of a micro-batch's activations in each stage.
    """
    schedule = schedule_for(rule_named(rule), layout, num_stages=num_stages)
    owners, count = owners_of(schedule, layout, num_stages, (replicas, 1, micro_batches))
    stages = tuple(_stage(k, owners[k], tape) for k in range(num_stages))
    draft = Plan(
        rule=rule,
        layout=layout,
        backward=rule_named(rule).modes[0],
        replicas=replicas,
        micro_batches=micro_batches,
        workers=tuple(WorkerPlan(name=f"w{k}", device="cpu", threads=1) for k in range(count)),
        stages=stages,
        states={"*": ((REPLICAS, Split(0)),)} if split_states else {},
        sharded=SHARDED[:1],
        **_NOTHING,
    )
    edges = [_edge(draft, k) for k in range(num_stages - 1)]
    draft = replace(draft, edges=tuple(edges))
    return replace(draft, exchanges=tuple(e for k in range(num_stages) for e in _exchanges(draft, k)))


_NOTHING: dict[str, Any] = {
    "format": FORMAT,
    "model": "a chain of equal stages",
    "predictor": NO_PREDICTOR,
    "recompute": (),
    "compile": False,
    "precision": "fp32",
    "loss_scale": "none",
    "clip": "none",
    "ema": 0.0,
    "deterministic": False,
    "shards": 0,
    "mesh": {},
    "parameters": {},
    "outputs": {},
    "transport": "memory",
    "deadline_s": 60.0,
    "latency_s": 0.0,
    "bytes_per_s": 1e30,
    "instruction_s": 0.0,
    "read_s": 0.0,
    "input_bytes": 0,
    "edges": (),
    "exchanges": (),
}
"""The fields of a plan that the counting does not depend on."""


def _stage(number: int, owners: Sequence[int], tape: int) -> StagePlan:
    return StagePlan(
        workers=tuple([f"w{worker}" for worker in owners]),
        segments=(f"stage {number}",),
        forward_s=1.0,
        backward_s=1.0,
        weights_s=0.0,
        update_s=0.0,
        parameter_bytes=4 * ELEMENTS,
        tape_bytes=tape,
        owed_bytes=0,
    )


def _edge(draft: Plan, source: int) -> EdgePlan:
    slots = 2 if draft.layout == PIPELINE else slots_in_layout(draft, source, source + 1)
    sizes = {"forward_bytes": MESSAGE, "backward_bytes": MESSAGE}
    return EdgePlan(source=source, target=source + 1, slots=slots, gradient=True, **sizes)


def _exchanges(draft: Plan, stage: int) -> list[ExchangePlan]:
    if read(draft).sums_over_time:
        return [_exchange(stage, GRADIENT, ())]
    if draft.states:
        return [_exchange(stage, GRADIENT, reduce_scatter()), _exchange(stage, "weight", all_gather())]
    return [_exchange(stage, GRADIENT, all_reduce())] if draft.replicas > 1 else []


def _exchange(stage: int, kind: str, phases: Sequence[Phase]) -> ExchangePlan:
    return ExchangePlan(
        stage=stage,
        kind=kind,
        axis=REPLICAS,
        value="",
        segment=0,
        phases=tuple(phases),
        dtypes=("float32",),
        shapes=((ELEMENTS,),),
        unused=(),
    )


def count(plan: Plan, size: int, parts: int = 1) -> Costs:
    """Count what a plan of :func:`chain` costs in a batch in the middle of a run.

    Args:
        plan: the plan.
        size: N, into whose units the costs are converted: stages of the model, and micro-batches of a batch.
        parts: micro-batches of the plan that have as many rows as one of the N.
    """
    run = simulate(plan, emit(read(plan)), stream([plan.micro_batches] * BATCHES))
    sent = sent_in_batch(plan, run, BATCHES // 2)
    tapes = max(worker.tape_bytes_peak for worker in run.workers)
    weights = max(worker.version_bytes_peak for worker in run.workers)
    model, between = 4 * ELEMENTS * plan.num_stages, MESSAGE * max(1, plan.num_stages - 1)
    return Costs(
        activations=Fraction(tapes, TAPE * plan.num_stages * parts),
        parameters=Fraction(weights, model),
        gradients=Fraction(sent["gradients"], 2 * max(1, size - 1) * model),
        messages=Fraction(sent["messages"], 2 * size * between * parts),
        steps=_steps(plan, run),
        devices=plan.num_workers,
    )


def sent_in_batch(plan: Plan, run: Simulation, batch: int) -> Mapping[str, int]:
    """Bytes that all workers send to others in a batch: ``gradients``, or states, and ``messages`` between stages."""
    channels = {channel.id: channel for channel in channels_of(read(plan))}
    given, totals = given_bytes(read(plan)), {"gradients": 0, "messages": 0}
    for interval in run.intervals:
        if interval.g // plan.micro_batches == batch:
            for number in interval.gives:
                kind = "messages" if channels[number].kind in EDGES else "gradients"
                totals[kind] += given[number, interval.worker]
    return totals


def _steps(plan: Plan, run: Simulation) -> int:
    """The longest chain of messages each of which is sent, and waited for, at the end of one time step.

    A phase of an exchange among p workers is a ring's, of p - 1 steps: an all-reduce has two.
    """
    channels = {channel.id: channel for channel in channels_of(read(plan))}
    sent: dict[tuple[int, int], tuple[float, int]] = {}  # by message: when, and how many with it
    waited: dict[tuple[int, int, int], tuple[float, int]] = {}  # by worker, stage, micro-batch: when, and for how many
    longest = 0
    middle = [interval for interval in run.intervals if interval.g // plan.micro_batches == BATCHES // 2]
    for interval in sorted(middle, key=lambda one: (one.end_s, one.start_s)):
        own = interval.worker, interval.stage, interval.g
        when, before = waited.get(own, (-1.0, 0))
        before = before if when == interval.start_s else 0
        for number in interval.takes:
            channel = channels[number]
            if channel.kind == "data":  # which a loader gives to any form
                continue
            when, steps = sent.get((number, interval.g), (-1.0, 0))
            arrives = channel.phases or channel.dealt or not channel.filled_by(interval.worker)
            if when == interval.start_s and arrives:
                before = max(before, steps)
        longest, before = max(longest, before), before if interval.end_s == interval.start_s else 0
        waited[own] = interval.end_s, before
        for number in interval.gives:
            hops = len(channels[number].phases) * (len(channels[number].sources) - 1) or 1
            sent[number, interval.g] = interval.end_s, before + hops
    return longest
