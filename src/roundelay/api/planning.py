"""Capture a job and plan it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roundelay.api.job_check import check_inputs, check_job
from roundelay.api.quiet import without_dumps
from roundelay.api.threads import one_thread
from roundelay.api.weights_file import check_filled, fill
from roundelay.errors import PlanError, RoundelayError, UserCodeError
from roundelay.frontend import Captured
from roundelay.frontend import capture as capture_model
from roundelay.frontend.batch import split
from roundelay.frontend.profile import StageProfile, profile
from roundelay.ir.graph import WEIGHT, Graph
from roundelay.ir.plan import FORMAT, EdgePlan, Plan, StagePlan
from roundelay.ir.rule import DISTANCES, NO_PREDICTOR, rule_named
from roundelay.ir.stage import Edge, Partition
from roundelay.job import Job
from roundelay.lower.check import check_fit, check_plan
from roundelay.lower.partition import partition
from roundelay.planner.prove import prove
from roundelay.planner.stages import choose_cuts, slots
from roundelay.runtime.optimizer import build_optimizer, build_scheduler
from roundelay.runtime.reader import first_batch
from roundelay.schedules import schedule_named

DEADLINE_S = 300.0
LINKS = {"memory": (2e-5, 1e11), "shm": (1e-4, 2.5e9), "gloo": (4e-4, 1.5e9)}
"""Transport to (seconds of an empty message, bytes per second), as measured between two workers of one host."""


def default_workers() -> int:
    """Workers when nothing is said: one per core, at most two."""
    return min(2, os.cpu_count() or 1)


def capture(job: Job, *, seed: int = 0) -> Captured:
    """Capture a job's model with its loss, called on the job's first batch.

    Raises:
        CaptureError: the model cannot be exported.
        JobError: data, loss, optimizer or scheduler cannot be used.
    """
    check_job(job)
    if job.weights is not None:
        fill(job.model, Path(job.weights))
    check_filled(job.model)
    with one_thread():
        sample = first_batch(job.batches, seed)
        check_inputs(job, sample)
        with without_dumps():
            captured = capture_model(job.model, job.loss, sample, job.inputs)
        build_scheduler(job.scheduler, build_optimizer(job.optimizer, list(job.model.named_parameters())))
        return captured


def plan(
    job: Job,
    *,
    workers: int | None = None,
    rule: str = "pipeoptim",
    seed: int = 0,
    captured: Captured | None = None,
    cuts: Sequence[Sequence[str]] | None = None,
    **choices: Any,
) -> Plan:
    """Plan a job: choose what is not given, measure the stages, and prove the result.

    Args:
        job: the job.
        workers: number of stages, D.
        rule: update rule.
        seed: for the sample batch.
        captured: the job's model if it has been captured before.
        cuts: operations that end the segments of every stage, instead of balanced ones.
        choices: ``micro_batches``, ``predictor``, ``backward``, ``transport``, ``deadline_s``.

    Raises:
        CaptureError: the model cannot be captured, or not be cut into so many stages.
        PlanError: the choices do not go together.
    """
    captured = captured or capture(job, seed=seed)
    row = rule_named(rule)
    num_stages = default_workers() if workers is None else workers
    if num_stages < 1:
        raise PlanError("workers", got=str(num_stages), expected="at least 1", remedy="Give --workers 1 or more.")
    flushes = schedule_named(row.schedule).window == "batch"
    given = {name: value for name, value in choices.items() if value is not None}
    unknown = set(given) - {"micro_batches", "predictor", "backward", "transport", "deadline_s"}
    if unknown:
        raise TypeError(f"plan() got unexpected choices: {', '.join(sorted(unknown))}")
    transport = given.get("transport", "memory")
    latency_s, bytes_per_s = LINKS.get(transport, LINKS["gloo"])
    draft = Plan(
        format=FORMAT,
        model=captured.graph.fingerprint,
        rule=rule,
        predictor=given.get("predictor", next(iter(DISTANCES)) if row.predicts else NO_PREDICTOR),
        backward=given.get("backward", row.modes[0]),
        micro_batches=given.get("micro_batches", 2 * num_stages if flushes else 1),
        transport=transport,
        deadline_s=given.get("deadline_s", DEADLINE_S),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        stages=tuple(
            StagePlan(
                segments=tuple(ends), forward_s=0.0, backward_s=0.0, update_s=0.0, parameter_bytes=0, tape_bytes=0
            )
            for ends in (cuts or [(end,) for end in choose_cuts(captured.graph, num_stages)])
        ),
        edges=(),
    )
    return _measured(job, captured, draft, seed)


def fitted(captured: Captured, plan: Plan) -> Partition:
    """The stages of a plan that fits the captured model, proved.

    Raises:
        PlanError: it does not fit, or cannot be obeyed.
    """
    check_plan(plan)
    ours = plan.model == captured.graph.fingerprint  # cuts of another model mean nothing in this one
    stages = partition(captured.graph, [stage.segments for stage in plan.stages]) if ours else Partition(())
    check_fit(plan, captured.graph.fingerprint, stages)
    prove(plan)
    return stages


def _measured(job: Job, captured: Captured, draft: Plan, seed: int) -> Plan:
    """The draft with edges, measured seconds and bytes."""
    stages = partition(captured.graph, [stage.segments for stage in draft.stages])
    sample = split(first_batch(job.batches, seed), max(1, draft.micro_batches))[0]
    edges = tuple(_edge(captured.graph, edge, draft.micro_batches) for edge in stages.edges)
    checked = _with(draft, edges, ())
    check_plan(checked)
    try:
        with one_thread():
            measured = profile(captured, stages, sample, draft.backward)  # type: ignore[arg-type]
    except RoundelayError:
        raise
    except Exception as error:  # the person's own code
        raise UserCodeError(
            "measuring the stages on the first micro-batch",
            got=f"{type(error).__name__}: {error}",
            expected="a model and a loss that can be computed again and again",
            remedy="Correct the model or the loss; ROUNDELAY_DEBUG=1 shows the traceback.",
        ) from error
    made = _with(draft, edges, _stages(captured.graph, draft, stages, measured))
    prove(made)
    return made


def _with(draft: Plan, edges: tuple[EdgePlan, ...], stages: tuple[StagePlan, ...]) -> Plan:
    values = {name: getattr(draft, name) for name in draft.__dataclass_fields__}
    return Plan(**(values | {"edges": edges, "stages": stages or draft.stages}))


def _stages(graph: Graph, draft: Plan, stages: Partition, measured: Sequence[StageProfile]) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            segments=stage.segments,
            forward_s=_round(part.forward_s),
            backward_s=_round(part.backward_s),
            update_s=_round(part.update_s),
            parameter_bytes=sum(graph.parameters[n].num_bytes for n in spec.parameters),
            tape_bytes=part.tape_bytes,
        )
        for stage, spec, part in zip(draft.stages, stages.stages, measured, strict=True)
    )


def _round(seconds: float) -> float:
    """Microseconds are as much as a measurement says."""
    return round(seconds, 6)


def _edge(graph: Graph, edge: Edge, micro_batches: int) -> EdgePlan:
    return EdgePlan(
        source=edge.source,
        target=edge.target,
        slots=slots(edge.source, edge.target),
        forward_bytes=sum(_bytes(graph, name) for name in edge.values) // _share(graph, micro_batches),
        backward_bytes=sum(_bytes(graph, name) for name in edge.gradients) // _share(graph, micro_batches),
        gradient=bool(edge.gradients),
    )


def _share(graph: Graph, micro_batches: int) -> int:
    """How many micro-batches the sample, a whole batch, is cut into."""
    return max(1, min(micro_batches, graph.sample_rows))


def _bytes(graph: Graph, name: str) -> int:
    if name.startswith(WEIGHT):
        return graph.parameters[name.removeprefix(WEIGHT)].num_bytes
    return graph.values[name].num_bytes


def explain(captured: Captured, plan: Plan) -> list[str]:
    """Comments for the plan's text: what it says, in words."""
    rule = rule_named(plan.rule)
    lines = [
        f"{type(captured.model).__name__} on {plan.num_stages} workers by rule {plan.rule} ({rule.source}).",
        f"{len(captured.graph.ops)} operations, {len(captured.graph.cuts)} places to cut.",
    ]
    for k, stage in enumerate(plan.stages):
        ends = ", ".join(f"{end} ({_module(captured.graph, end)})" for end in stage.segments)
        lines.append(f"stage {k}: up to {ends}; {stage.parameter_bytes / 1e6:.2f} MB of weights")
    for edge in plan.edges:
        lines.append(f"{edge.source}>{edge.target}: {edge.forward_bytes} bytes forward, {edge.backward_bytes} back")
    if rule.predicts and plan.backward == "stash":
        lines.append("stash: stage k holds up to D-1-k predicted copies of its weights beside the live one")
    return lines


def _module(graph: Graph, name: str) -> str:
    op = graph.ops[graph.index(name)]
    return f"{op.module or 'the model'}, {op.target}"
