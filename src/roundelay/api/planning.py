"""Capture a job, and plan it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from roundelay.api.compile_stages import compile_stages, for_plan
from roundelay.api.cuts import MEASURED, Cut, CutRequest, Stages, cut, given_stages, user_code_errors
from roundelay.api.num_micro_batches import EXAMINED_BATCHES, check_counts, choose_micro_batches, needs_micro_batches
from roundelay.api.recompute_choice import choose_modules, describe_recompute, describe_savings, recomputed_ranges
from roundelay.api.statelessness import check_sharing, check_stateless, refusing_calls, untouched
from roundelay.api.torch_scope import one_thread, without_dumps
from roundelay.api.validate_job import check_evaluated, check_inputs, check_job
from roundelay.api.weights_file import check_filled, fill
from roundelay.errors import CaptureError, PlanError, UsageError, counted
from roundelay.frontend import Captured
from roundelay.frontend import capture as capture_model
from roundelay.frontend.batch import Batch, split
from roundelay.frontend.model_call import train as train_mode
from roundelay.frontend.stage_profiler import StageProfile, profile
from roundelay.ir.clip import NO_CLIP
from roundelay.ir.graph import Graph
from roundelay.ir.loss_scale import DYNAMIC
from roundelay.ir.plan import FORMAT, NO_EMA, EdgePlan, Plan, StagePlan
from roundelay.ir.rule import NO_PREDICTOR, UpdateRule, rule_named
from roundelay.ir.stage import Edge, Partition
from roundelay.job import Job
from roundelay.lower.dataflow import message_bytes
from roundelay.lower.partition import partition
from roundelay.lower.validate_plan import CPU, HALF, PRECISIONS, check_deadline, check_fit, check_plan
from roundelay.planner.cost_model import CostParameters, boundaries_of
from roundelay.planner.partition_dp import slots
from roundelay.planner.prove import prove
from roundelay.runtime.device import named
from roundelay.runtime.forked_call import apart
from roundelay.runtime.loader_probe import DEADLINE_S, first_batch, first_batches, reading_s
from roundelay.runtime.lr_schedule_check import check_made_alike
from roundelay.runtime.prefetch import Tell, silent
from roundelay.schedules import Schedule, num_workers, schedule_named, schedule_of, workers_of

LINKS = {"memory": (2e-5, 1e11), "shm": (1e-4, 2.5e9), "gloo": (4e-4, 1.5e9), "nccl": (4e-4, 2e10)}
"""Transport to (seconds of an empty message, bytes per second), measured between two workers on one host. nccl sends
its frames over gloo; its bytes per second are assumed (a PCIe 4.0 slot), not measured."""

CHOICES = (
    "micro_batches",
    "predictor",
    "backward",
    "recompute",
    "compile",
    "precision",
    "loss_scale",
    "clip",
    "ema",
    "transport",
    "deadline_s",
    "devices",
)


def default_workers() -> int:
    """The default number of workers: one per core, at most two; fewer if the model cannot be cut so often."""
    return min(2, os.cpu_count() or 1)


def capture(job: Job, *, seed: int = 0, deadline_s: float = DEADLINE_S, tell: Tell = silent) -> Captured:
    """Capture a job's model and loss, called on the job's first batch.

    Args:
        job: the job.
        seed: of the data.
        deadline_s: seconds to wait for the batch.
        tell: called when waiting takes long.

    Raises:
        CaptureError: the model cannot be exported.
        JobError: data, loss, optimizer or scheduler cannot be used.
        DeadlineError: the batch did not come in time.
    """
    check_job(job)
    check_deadline(deadline_s)
    if job.weights is not None:
        fill(job.model, Path(job.weights))
    check_filled(job.model)
    with one_thread():
        with refusing_calls(job.model):
            sample = first_batch(job.batches, seed, deadline_s, tell)
        train_mode(job.model)
        with untouched(job):
            return _captured(job, sample)


def _captured(job: Job, sample: Batch) -> Captured:
    with untouched(job):
        check_inputs(job, sample)
    with without_dumps():
        captured = capture_model(job.model, job.loss, sample, job.inputs)
    check_stateless(job, captured, sample)
    check_sharing(job, captured)
    check_counts(captured, sample)
    rates = check_made_alike(job)
    if rates.waits:
        check_evaluated(job)
    return captured


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the reasons for its choices in words.

    Args:
        plan: the plan.
        reasons: all of them.
        notices: those that are always shown to the user: fewer workers or micro-batches than the default, or training
            that differs from that of whole batches.
    """

    plan: Plan
    reasons: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def plan(
    job: Job,
    *,
    workers: int | None = None,
    rule: str = "pipeoptim",
    seed: int = 0,
    captured: Captured | None = None,
    cuts: CutRequest | None = None,
    **choices: Any,
) -> Plan:
    """Plan a job: choose everything that is not given, measure the stages, and prove the resulting plan.

    Args:
        job: the job.
        workers: D; each gets one stage, or two with a rule such as ``zb-v``.
        rule: update rule.
        seed: of the sample batch.
        captured: the job's model if it has been captured already.
        cuts: ``measured`` on this machine (the default), ``roofline`` (predicted, the same on every machine), ``equal``
            (numbers of operations), or names of operations: comma-separated, those that end the stages, or a list for
            each stage of those that end its segments.
        choices: ``micro_batches``, ``predictor``, ``backward``, ``recompute``, ``compile``, ``precision``,
            ``loss_scale``, ``clip``, ``ema``, ``transport``, ``deadline_s``, ``devices``.

    Raises:
        CaptureError: the model cannot be captured, or cannot be cut into so many stages.
        PlanError: the choices cannot be combined.
        DeadlineError: a batch did not come within ``deadline_s``.
    """
    return plan_with_reasons(job, workers=workers, rule=rule, seed=seed, captured=captured, cuts=cuts, **choices).plan


def captured_and_planned(
    function: Callable[..., Any], job: Job, plan: Plan | None, seed: int, choices: Mapping[str, Any]
) -> tuple[Captured, Plan]:
    """Return the captured job, and the plan passed to a function, or one made from the choices passed to it.

    Args:
        function: the function, to name it in errors.
        job: the job.
        plan: the plan, or None.
        seed: of the data.
        choices: as for :func:`plan`, including ``workers``, ``rule`` and ``cuts``; None means not given.

    Raises:
        TypeError: a choice is unknown.
        UsageError: both a plan and a choice were given.
    """
    check_choices(function, choices, ("workers", "rule", "cuts", *CHOICES))
    given = {name: value for name, value in choices.items() if value is not None}
    if plan is None:
        captured = capture(job, seed=seed, deadline_s=given.get("deadline_s", DEADLINE_S))
        return captured, plan_with_reasons(job, captured=captured, seed=seed, **given).plan
    if given:
        names, call = ", ".join(given), ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UsageError(
            f"plan together with {names} in roundelay.{function.__name__}",
            got=f"a plan, and {call}",
            expected="one of them: a plan contains all choices",
            remedy=f"Leave {names} out, or leave the plan out, or make the plan by roundelay.plan(job, {call}).",
        )
    return capture(job, seed=seed, deadline_s=plan.deadline_s), plan


def plan_with_reasons(
    job: Job,
    *,
    workers: int | None = None,
    rule: str = "pipeoptim",
    seed: int = 0,
    captured: Captured | None = None,
    cuts: CutRequest | None = None,
    tell: Tell = silent,
    **choices: Any,
) -> Planned:
    """As :func:`plan`, with the reasons for its choices; ``tell`` is called when waiting for the loader takes long."""
    check_choices(plan, choices)
    given = {name: value for name, value in choices.items() if value is not None}
    if job.ema is not None:
        given.setdefault("ema", job.ema)
    deadline_s = given.setdefault("deadline_s", DEADLINE_S)
    check_deadline(deadline_s)
    captured = captured or capture(job, seed=seed, deadline_s=deadline_s, tell=tell)
    cuts = MEASURED if cuts is None else cuts
    stages = given_stages(captured.graph, cuts)
    schedule = schedule_named(rule_named(rule).schedule)
    num_stages, fewer = _num_stages(captured.graph, workers, stages, rule)
    owners = schedule.workers(num_stages)
    draft = _draft(captured.graph.fingerprint, rule, num_stages // schedule.stages_per_worker, given)
    with untouched(job):
        choice = choose_micro_batches(
            captured,
            rule_named(rule),
            draft.micro_batches,
            lambda: first_batches(job.batches, seed, EXAMINED_BATCHES, deadline_s, budget_s=1.0),
            requested="micro_batches" in given,
        )
    draft = replace(draft, micro_batches=choice.micro_batches)
    draft = replace(draft, recompute=choose_modules(captured, draft.backward, given.get("recompute")))
    on = named(given.get("devices"), len(set(owners)), draft.transport)
    captured = for_plan(captured, draft)
    chosen = (
        Cut(stages, ("cuts: as given",))
        if stages is not None
        else _cut(job, captured, draft, str(cuts), num_stages, lambda: _sample(job, captured.graph, draft, seed, tell))
    )
    cut_draft = replace(draft, stages=_unmeasured(chosen.stages, [on[worker] for worker in owners]))
    result, savings = _measure(job, captured, cut_draft, seed, tell, requested="recompute" in given)
    notices = tuple(reason for reason in (fewer, choice.notice) if reason)
    return Planned(result, (*notices, *chosen.reasons, *savings), notices)


def check_choices(function: Callable[..., Any], choices: Mapping[str, Any], known: Sequence[str] = CHOICES) -> None:
    """Refuse an unknown keyword argument of a function that takes ``**choices``.

    Raises:
        TypeError: naming it, and similar ones that are known.
    """
    for name in choices:
        if name not in known:
            own = [one.name for one in signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
            names = list(dict.fromkeys([*own, *known]))
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it knows {', '.join(names)}"
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}")


def _num_stages(graph: Graph, workers: int | None, stages: Stages | None, rule: str) -> tuple[int, str]:
    """Return the number of stages, as given or for the workers; and why there are fewer than by default, if so."""
    if workers is not None and workers < 1:
        raise PlanError("workers", got=str(workers), expected="at least 1", remedy="Give --workers 1 or more.")
    each = schedule_named(rule_named(rule).schedule).stages_per_worker
    if stages is None:
        return _stages_for_workers(len(boundaries_of(graph)) - 1, workers, each, rule)
    if len(stages) % each or workers not in (None, len(stages) // each):
        wanted = f"{each} for each worker" if workers is None else f"{each * workers}, {each} for each worker"
        raise PlanError(
            "the cuts",
            got=f"{len(stages)} stages",
            expected=wanted if each > 1 else f"{workers}, one for each worker",
            remedy="Name one operation fewer than there are stages, or leave the number of workers out.",
        )
    return len(stages), ""


def _stages_for_workers(pieces: int, workers: int | None, each: int, rule: str) -> tuple[int, str]:
    """Return the number of stages for the workers given, or for the default number as far as the model can be cut.

    Raises:
        CaptureError: the model cannot be cut into so many.
    """
    most = pieces // each
    wanted = default_workers() if workers is None else workers
    if wanted <= most:
        return each * wanted, ""
    limit = f"can be cut into {counted(pieces, 'stage')} at most"
    if workers is None and most:
        return each * most, f"{counted(most, 'worker')}, not {wanted}: the model {limit}"
    per_worker = f", {each} for each worker by {rule}" if each > 1 else ""
    raise CaptureError(
        f"a cut into {each * wanted} stages, for {counted(wanted, 'worker')}",
        got=f"a model that {limit}",
        expected=f"at least {each * wanted} stages{per_worker}",
        remedy=f"Give --workers {most}, or a model of more operations."
        if most
        else "Give another rule: --rule 1f1b, for example, has one stage for each worker.",
    )


def _draft(model: str, rule: str, workers: int, given: Mapping[str, Any]) -> Plan:
    """Return the plan without stages and edges."""
    row = rule_named(rule)
    flushes = schedule_named(row.schedule).window == "batch"
    transport = given.get("transport", "memory")
    latency_s, bytes_per_s = LINKS.get(transport, LINKS["gloo"])
    return Plan(
        format=FORMAT,
        model=model,
        rule=rule,
        predictor=given.get("predictor", row.predictors[0] if row.predicts else NO_PREDICTOR),
        backward=given.get("backward", row.modes[0]),
        recompute=(),
        compile=given.get("compile", False),
        precision=given.get("precision", PRECISIONS[0]),
        loss_scale=given.get("loss_scale", DYNAMIC if given.get("precision") == HALF else "none"),
        clip=given.get("clip", NO_CLIP.by),
        ema=given.get("ema", NO_EMA),
        micro_batches=given.get(
            "micro_batches", 2 * workers if flushes else workers if needs_micro_batches(row) else 1
        ),
        transport=transport,
        deadline_s=given["deadline_s"],
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        read_s=0.0,
        stages=(),
        edges=(),
    )


def _unmeasured(stages: Stages, devices: Sequence[str]) -> tuple[StagePlan, ...]:
    """Return stages with their ends and devices, and zeros for what is measured later."""
    nothing: dict[str, Any] = dict.fromkeys(("forward_s", "backward_s", "weights_s", "update_s"), 0.0)
    nothing |= dict.fromkeys(("parameter_bytes", "tape_bytes", "owed_bytes"), 0)
    return tuple(StagePlan(segments=ends, device=on, **nothing) for ends, on in zip(stages, devices, strict=True))


def _cut(job: Job, captured: Captured, draft: Plan, cuts: str, num_stages: int, sample: Callable[[], Batch]) -> Cut:
    terms = CostParameters(
        again=recomputed_ranges(captured.graph, draft),
        micro_batches=draft.micro_batches,
        latency_s=draft.latency_s,
        bytes_per_s=draft.bytes_per_s,
    )
    with untouched(job):
        return cut(captured, cuts, num_stages, terms, sample)


def _sample(job: Job, graph: Graph, draft: Plan, seed: int, tell: Tell) -> Batch:
    """The first micro-batch of the size that will be trained on."""
    return split(first_batch(job.batches, seed, draft.deadline_s, tell), max(1, draft.micro_batches), graph.min_rows)[0]


def fitted(captured: Captured, plan: Plan) -> Partition:
    """Check a plan against the captured model, prove it, and return its stages.

    Raises:
        PlanError: it does not fit the model, or cannot be executed.
    """
    check_plan(plan)
    ours = plan.model == captured.graph.fingerprint  # cuts of another model mean nothing in this one
    stages = (
        partition(captured.graph, [stage.segments for stage in plan.stages], plan.recompute) if ours else Partition(())
    )
    check_fit(plan, captured.graph.fingerprint, stages)
    prove(plan)
    return stages


def _measure(
    job: Job, captured: Captured, draft: Plan, seed: int, tell: Tell, *, requested: bool
) -> tuple[Plan, tuple[str, ...]]:
    """Return the draft with edges and measurements; and what recomputing modules saves, in words."""
    stages = partition(captured.graph, [stage.segments for stage in draft.stages], draft.recompute)
    sample = _sample(job, captured.graph, draft, seed, tell)
    schedule = schedule_of(draft)
    edges = tuple(_edge(captured.graph, edge, draft, schedule) for edge in stages.edges)
    checked = replace(draft, edges=edges)
    check_plan(checked)
    devices = [torch.device(name) for name in draft.devices]
    halved = schedule.halved

    def profiles() -> list[StageProfile]:
        compile_stages(job, captured, draft, stages, seed)
        with user_code_errors("measuring the stages on the first micro-batch"), one_thread(), untouched(job):
            return profile(captured, stages, sample, draft.backward, devices, halved=halved)  # type: ignore[arg-type]

    measured = profiles() if set(draft.devices) != {CPU} else _measure_in_child(profiles)
    with user_code_errors("measuring the loader"), one_thread():
        read: list[Batch] = []
        least, look = captured.graph.min_rows, read.append
        read_s = reading_s(job.batches, seed, draft.micro_batches, draft.deadline_s, tell, look, min_rows=least)
        with untouched(job):
            for micro_batch in read:
                captured.check_numbers(micro_batch)
    captured.settings.check()  # the loader may have changed the model
    result = replace(checked, stages=_stages(captured.graph, draft, stages, measured), read_s=_round(read_s))
    prove(result)
    return result, describe_savings(captured.graph, draft, stages, measured, requested=requested)


def _measure_in_child(profiles: Callable[[], list[StageProfile]]) -> list[StageProfile]:
    """Measure in a forked child: a backward in this process may break later forks."""
    rows = apart(lambda: [asdict(one) for one in profiles()], "measuring the stages on the first micro-batch")
    return [StageProfile(**{**row, "spared_bytes": tuple(row["spared_bytes"])}) for row in rows]


def _stages(graph: Graph, draft: Plan, stages: Partition, measured: Sequence[StageProfile]) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            segments=stage.segments,
            device=stage.device,
            forward_s=_round(part.forward_s),
            backward_s=_round(part.backward_s),
            weights_s=_round(part.weights_s),
            update_s=_round(part.update_s),
            parameter_bytes=sum(graph.parameters[n].num_bytes for n in spec.parameters),
            tape_bytes=part.tape_bytes,
            owed_bytes=part.owed_bytes,
        )
        for stage, spec, part in zip(draft.stages, stages.stages, measured, strict=True)
    )


def _round(seconds: float) -> float:
    """Round to microseconds, the resolution of a measurement."""
    return round(seconds, 6)


def _edge(graph: Graph, edge: Edge, draft: Plan, schedule: Schedule) -> EdgePlan:
    num_slots = slots(edge.source, edge.target) if schedule.stages_per_worker == 1 else draft.num_stages
    return EdgePlan(
        source=edge.source,
        target=edge.target,
        slots=num_slots,
        forward_bytes=message_bytes(graph, edge.values, draft.micro_batches),
        backward_bytes=message_bytes(graph, edge.gradients, draft.micro_batches),
        gradient=bool(edge.gradients),
    )


def explain(captured: Captured, plan: Plan, reasons: Sequence[str] = ()) -> list[str]:
    """Return comments for the plan's text: the plan in words, and the reasons for its choices if they are known."""
    rule = rule_named(plan.rule)
    owners, size = workers_of(plan), num_workers(plan)
    lines = [
        f"{type(captured.model).__name__} on {counted(size, 'worker')} by rule {plan.rule} ({rule.source}).",
        f"{counted(len(captured.graph.ops), 'operation')}, {counted(len(captured.graph.cuts), 'place')} to cut.",
    ]
    for k, stage in enumerate(plan.stages):
        ends = ", ".join(f"{end} ({_operation(captured.graph, end)})" for end in stage.segments)
        where = "" if size == plan.num_stages else f", worker {owners[k]}"
        where += "" if stage.device == CPU else f" on {stage.device}"
        lines.append(f"stage {k}{where}: up to {ends}; {stage.parameter_bytes / 1e6:.2f} MB of weights")
    for edge in plan.edges:
        lines.append(f"{edge.source}>{edge.target}: {edge.forward_bytes} bytes forward, {edge.backward_bytes} back")
    if plan.read_s:
        lines.append(_loader(plan))
    lines += describe_recompute(captured, plan)
    if plan.compile:
        lines.append("compile: for the shapes of the first batch; micro-batches of other shapes are computed without")
    if plan.precision == HALF:
        flushes = schedule_named(rule.schedule).window == "batch"
        who, where = ("every stage", "anywhere") if flushes else ("a stage", "there")
        lines.append(f"fp16: {who} skips the update of a batch whose gradients are not finite {where}")
    if rule.predicts and plan.backward == "stash":
        lines.append("stash: stage k holds up to D-1-k predicted copies of its weights beside the live one")
    if far := _staleness_warning(plan, rule):
        lines.append(far)
    return [*lines, *reasons]


def _loader(plan: Plan) -> str:
    """Describe the loader's seconds, with a warning if it limits the rate."""
    again = plan.backward == "recompute"
    slowest = max(s.forward_s * (1 + again) + s.backward_s + s.weights_s for s in plan.stages)
    line = f"data: {plan.read_s * 1e3:.3g} ms per micro-batch, loaded by a thread of worker 0 while the stages compute"
    if plan.read_s <= slowest:
        return line
    passes = f"{slowest * 1e3:.3g} ms (forward_s + backward_s)"
    return f"{line}; warning: no stage takes more than {passes}, so the loader sets the rate"


FAR = 7
"""Staleness in updates at which training with some rules was seen to fail (benchmarks/depth)."""


def _staleness_warning(plan: Plan, rule: UpdateRule) -> str:
    """A warning if stage 0 reads weights so stale that training was seen to fail; else empty."""
    crossed = -(-(plan.num_stages - 1) // plan.micro_batches)
    if schedule_named(rule.schedule).window == "batch" or rule.versions == "table" or crossed < FAR:
        return ""
    return (
        f"warning: stage 0 runs {crossed} updates behind, where training was seen to fail; give "
        f"--micro-batches {plan.num_stages - 1} or more, which leaves 1, best with --rule rehearse"
    )


def _operation(graph: Graph, name: str) -> str:
    op = graph.ops[graph.index(name)]
    return f"{op.module or 'the model'}, {op.target}"
