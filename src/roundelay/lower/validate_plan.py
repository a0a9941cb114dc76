"""Validates a plan, field by field, before anything is executed."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.errors import PlanError, did_you_mean
from roundelay.ir.device_names import CPU, DEVICE
from roundelay.ir.loss_scale import DYNAMIC
from roundelay.ir.plan import FORMAT, Plan
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.ir.stage import Partition
from roundelay.ir.transports import TRANSPORTS, Transport
from roundelay.lower.reading import Reading, read
from roundelay.lower.validate_layout import check_layout
from roundelay.lower.validate_mesh import check_mesh, check_workers
from roundelay.schedules import LAYOUTS, PIPELINE

PRECISIONS = ("fp32", "bf16", "fp16")
HALF = "fp16"
"""The precision whose gradients need a loss scale, as they underflow easily."""

MOST_THREADS = 1024
"""Most intra-op threads of a worker: each is a thread of the system."""

LONGEST_S = 3.2e7
"""Longest deadline of a plan, in seconds."""


def check_plan(plan: Plan) -> Reading:
    """Check that a run can execute the plan, and return its reading.

    Raises:
        PlanError: naming the first invalid field.
    """
    reading = read(plan)
    check_settings(reading)
    check_workers(reading)
    check_devices(plan, reading.transport)
    _check_threads(plan)
    _check_in_flight(reading)
    _check_edges(plan)
    for k, worker in enumerate(plan.workers):
        _above_zero(f"workers[{k}].speed", worker.speed)
    return reading


def check_settings(reading: Reading) -> None:
    """Check what holds of a plan whatever its stages, workers and edges are; a draft need not have these yet.

    Raises:
        PlanError: naming the first invalid field.
    """
    plan, rule = reading.plan, reading.rule
    predictors = rule.predictors if rule.predicts else (NO_PREDICTOR,)
    _one_of(
        "predictor", plan.predictor, predictors, f"rule {rule.name!r} " + ("predicts" if rule.predicts else "does not")
    )
    _one_of("backward", plan.backward, rule.modes, f"rule {rule.name!r} allows these")
    _one_of("layout", plan.layout, (PIPELINE, *LAYOUTS), "how micro-batches and stages lie on workers")
    check_layout(reading)
    _check_recompute(plan)
    if reading.free:
        _check_free(plan)
    _check_clip(reading)
    check_precision(plan)
    _check_loss_scale(plan)
    _check_ema(plan.ema)
    _at_least("format", plan.format, FORMAT)
    _at_least("replicas", plan.replicas, 1)
    _at_least("micro_batches", plan.micro_batches, 1)
    check_deadline(plan.deadline_s)
    _above_zero("bytes_per_s", plan.bytes_per_s)
    if reading.schedule.halved:
        _check_halves(plan)
    check_mesh(reading)


def _check_edges(plan: Plan) -> None:
    """Check that each pair of stages has one edge at most, and neighbours have one."""
    for i, edge in enumerate(plan.edges):
        _at_least(f"edges[{i}].slots", edge.slots, 1)
        if not 0 <= edge.source < edge.target < plan.num_stages:
            raise PlanError(
                f"edges[{i}] of the plan",
                got=f"from stage {edge.source} to stage {edge.target}",
                expected=f"an earlier and a later one of the {plan.num_stages} stages",
                remedy="Correct the edge, or write a new plan with `roundelay plan`.",
            )
    missing = {(k, k + 1) for k in range(plan.num_stages - 1)} - {(e.source, e.target) for e in plan.edges}
    if missing or len({(e.source, e.target) for e in plan.edges}) != len(plan.edges):
        raise PlanError(
            "edges of the plan",
            got=f"no edge {min(missing)}" if missing else "an edge given twice",
            expected="one edge for each pair of stages that share a value, neighbours included",
            remedy="Correct the edges, or write a new plan with `roundelay plan`.",
        )


def _check_clip(reading: Reading) -> None:
    plan = reading.plan
    if plan.clip.by == "global" and reading.schedule.window == "run":
        raise PlanError(
            "clip of the plan",
            got=f"{plan.clip} with rule {plan.rule!r}, which never flushes",
            expected="none, stage:NORM or previous:NORM: a batch's own norm is known when stage 0 has finished it, "
            "and by then the other stages have already updated",
            remedy="Choose previous:NORM, or a rule that flushes: gpipe, 1f1b, zb-h1 or zb-v.",
        )


def _check_recompute(plan: Plan) -> None:
    if plan.recompute and plan.backward == "recompute":
        raise PlanError(
            "recompute of the plan",
            got=f"{', '.join(plan.recompute)} with backward = recompute",
            expected="no module: that mode recomputes every stage as a whole",
            remedy="Remove --recompute, or choose another mode with --backward if the rule has one.",
        )


def _check_free(plan: Plan) -> None:
    """Check what a free order can be combined with: what needs no other worker's batch at a certain time."""
    refused = {
        "replicas": (plan.replicas > 1, plan.replicas, "1: replicas exchange gradients of a batch in one order"),
        "mesh": (plan.mesh_size > 1, plan.arrangement, "none: its workers exchange values in one order"),
        "clip": (plan.clip.whole, plan.clip, "none or stage:NORM: no other norm is known at a certain time"),
        "precision": (plan.loss_scale.on, plan.precision, "fp32 or bf16: a loss scale is one of all stages"),
    }
    for name, (wrong, got, expected) in refused.items():
        if wrong:
            raise PlanError(
                f"{name} of the plan, with rule {plan.rule!r}, which has no order",
                got=str(got),
                expected=expected,
                remedy="Change that, or choose a rule with an order, such as pipedream.",
            )


def _check_in_flight(reading: Reading) -> None:
    """Check that each stage says how many forwards may be in flight, if and only if the order is free."""
    for k, stage in enumerate(reading.plan.stages):
        if reading.free != bool(stage.in_flight):
            raise PlanError(
                f"stages[{k}].in_flight of the plan, with rule {reading.plan.rule!r}",
                got=str(stage.in_flight),
                expected="at least 1: so many forwards may be in flight" if reading.free else "0: the schedule says it",
                remedy="Correct the plan, or write a new one with `roundelay plan`.",
            )


def _check_halves(plan: Plan) -> None:
    """Check that backwards can run in two halves."""
    if plan.compile:
        raise PlanError(
            "compile of the plan",
            got=f"true with rule {plan.rule!r}, whose backwards run in two halves",
            expected="false: a compiled backward computes the gradients of inputs and weights at once",
            remedy="Remove --compile, or choose another rule: gpipe and 1f1b compute the same.",
        )


def check_precision(plan: Plan) -> None:
    """Check the precision; also called before the model is converted to it.

    Raises:
        PlanError: naming the field.
    """
    _one_of("precision", plan.precision, PRECISIONS, "in which stages compute")
    if plan.precision != PRECISIONS[0] and plan.compile and plan.backward == "mixed":
        raise PlanError(
            "precision of the plan",
            got=f"{plan.precision} with compile = true and backward mode mixed",
            expected="fp32: the tape of a compiled stage holds casts of the forward's weights, not marked as such",
            remedy="Remove --precision or --compile, or choose another mode with --backward if the rule has one.",
        )


def _check_loss_scale(plan: Plan) -> None:
    """Check that losses are scaled if and only if the precision is fp16."""
    if plan.loss_scale.on != (plan.precision == HALF):
        half = plan.precision == HALF
        raise PlanError(
            "loss_scale of the plan",
            got=f"{plan.loss_scale} with precision {plan.precision}",
            expected=f"{DYNAMIC}, or a power of two: small gradients underflow in fp16 (1 allows that)"
            if half
            else f"none: gradients in {plan.precision} have the exponent range of fp32",
            remedy=f"Give --loss-scale {DYNAMIC}." if half else "Remove --loss-scale, or give --precision fp16.",
        )


def check_devices(plan: Plan, transport: Transport) -> None:
    """Check what the workers' devices are called, and what each can be combined with.

    Raises:
        PlanError: naming the first worker whose device does not fit.
    """
    for k, worker in enumerate(plan.workers):
        name = worker.device
        if not DEVICE.fullmatch(name):
            raise PlanError(
                f"workers[{k}].device of the plan",
                got=repr(name),
                expected="cpu, or cuda:0, cuda:1 and so on",
                remedy="Correct the plan or --devices.",
            )
        if name != CPU and plan.compile:
            raise PlanError(
                f"workers[{k}].device of the plan",
                got=f"{name} with compile = true",
                expected="cpu: compiled stages have been tested on the CPU only",
                remedy="Choose --devices cpu, or remove --compile.",
            )
        device_type = name.split(":")[0]
        if device_type not in transport.devices:
            others = [other.name for other in TRANSPORTS.values() if device_type in other.devices]
            carried = " or ".join(transport.devices)
            raise PlanError(
                f"workers[{k}].device of the plan",
                got=f"{name} with transport {plan.transport}",
                expected=f"{carried}: {plan.transport} carries no other tensors",
                remedy=f"Choose --devices {carried}, or a transport for {device_type}: {', '.join(others)}.",
            )


def check_num_threads(name: str, count: int) -> None:
    """Refuse a number of intra-op threads that no worker can have.

    Args:
        name: of the choice or field.
        count: the number.

    Raises:
        PlanError: it is less than one, or more than a system bears.
    """
    if not 1 <= count <= MOST_THREADS:
        raise PlanError(
            name, got=str(count), expected=f"from 1 to {MOST_THREADS}", remedy="Correct --threads or the plan."
        )


def _check_threads(plan: Plan) -> None:
    """Check that every worker has a thread, and that those that update the same weights get the same bits."""
    for k, worker in enumerate(plan.workers):
        check_num_threads(f"workers[{k}].threads of the plan", worker.threads)
    threads = {worker.name: worker.threads for worker in plan.workers}
    for stage, planned in enumerate(plan.stages):
        counts = [threads[name] for name in planned.workers]
        if len(set(counts)) > 1:
            raise PlanError(
                f"threads of the workers that hold stage {stage}",
                got=", ".join(map(str, counts)),
                expected="one number: each updates the same weights, and bits may depend on it",
                remedy="Correct `threads` of the plan's workers.",
            )


def check_fit(plan: Plan, fingerprint: str, partition: Partition) -> None:
    """Check that the plan is for this model, and that its edges are those that its cuts need.

    Raises:
        PlanError: naming what does not match.
    """
    if plan.model != fingerprint:
        raise PlanError(
            "the plan's model",
            got=f"fingerprint {plan.model}",
            expected=f"{fingerprint}, the model of this job",
            remedy="Use the job that the plan was made for, or write a new plan with `roundelay plan`.",
        )
    planned = {(e.source, e.target): e.gradient for e in plan.edges}
    needed = {(e.source, e.target): bool(e.gradients) for e in partition.edges}
    if planned != needed:
        raise PlanError(
            "edges of the plan",
            got=_edges_text(planned),
            expected=_edges_text(needed) + ", which its cuts need",
            remedy="Correct the edges, or write a new plan with `roundelay plan`.",
        )


def _edges_text(edges: dict[tuple[int, int], bool]) -> str:
    return (
        ", ".join(f"{a}>{b}" + ("" if back else " (nothing back)") for (a, b), back in sorted(edges.items())) or "none"
    )


def _one_of(name: str, value: str, allowed: Sequence[str], why: str) -> None:
    if value not in allowed:
        raise PlanError(
            f"{name} of the plan",
            got=repr(value),
            expected=f"one of {', '.join(allowed)}: {why}",
            remedy=did_you_mean(value, allowed) + "Correct the plan or the option.",
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise PlanError(f"{name} of the plan", got=str(value), expected=f"at least {least}", remedy="Correct the plan.")


def check_deadline(seconds: float) -> None:
    """Check a deadline.

    Raises:
        PlanError: it is not above 0, not a number, or longer than a year.
    """
    if not 0 < seconds <= LONGEST_S:
        raise PlanError(
            "deadline_s of the plan",
            got=str(seconds),
            expected=f"more than 0 seconds, and at most {LONGEST_S:g}, a year",
            remedy="Correct the plan or --deadline-s.",
        )


def _check_ema(decay: float) -> None:
    if not 0.0 <= decay < 1.0:
        raise PlanError(
            "ema of the plan",
            got=f"{decay:g}",
            expected="a decay from 0 (no average) to less than 1, such as 0.999",
            remedy="Correct --ema, Job(ema=...) or the plan.",
        )


def _above_zero(name: str, value: float) -> None:
    if value <= 0:
        raise PlanError(f"{name} of the plan", got=str(value), expected="more than 0", remedy="Correct the plan.")
