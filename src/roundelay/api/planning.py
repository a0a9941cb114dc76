"""Capture a job and plan it."""

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
from roundelay.api.cuts import MEASURED, Asked, Cut, Stages, cut, given_stages, users_code
from roundelay.api.num_micro_batches import LOOKED_AT, check_counts, choose_parts, wants_parts
from roundelay.api.recompute_choice import again, meaning, names_for, spared
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
from roundelay.ir.plan import FORMAT, NO_EMA, EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import NO_PREDICTOR, UpdateRule, rule_named
from roundelay.ir.stage import Edge, Partition
from roundelay.job import Job
from roundelay.lower.dataflow import message_bytes
from roundelay.lower.emit import schedule_of
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
from roundelay.schedules import Schedule, schedule_named

LINKS = {"memory": (2e-5, 1e11), "shm": (1e-4, 2.5e9), "gloo": (4e-4, 1.5e9), "nccl": (4e-4, 2e10)}
"""Transport to (seconds of an empty message, bytes per second), as measured between two workers of one host; nccl's
frames are gloo's, and its bytes per second an assumption (a PCIe 4.0 slot), as it has not been measured yet."""

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
    """Workers when nothing is said: one per core, at most two; fewer for a model that cannot be cut into so many."""
    return min(2, os.cpu_count() or 1)


def capture(job: Job, *, seed: int = 0, deadline_s: float = DEADLINE_S, tell: Tell = silent) -> Captured:
    """Capture a job's model with its loss, called on the job's first batch.

    Args:
        job: the job.
        seed: of the data.
        deadline_s: seconds that the batch is waited for.
        tell: told of a long wait.

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
        told: those that a person must hear of, plan file or not: fewer workers or micro-batches than usual, or another
            training than that of whole batches.
    """

    plan: Plan
    reasons: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


def plan(
    job: Job,
    *,
    workers: int | None = None,
    rule: str = "pipeoptim",
    seed: int = 0,
    captured: Captured | None = None,
    cuts: Asked | None = None,
    **choices: Any,
) -> Plan:
    """Plan a job: choose what is not given, measure the stages, and prove the result.

    Args:
        job: the job.
        workers: D; each gets one stage, or two by a rule such as ``zb-v``.
        rule: update rule.
        seed: for the sample batch.
        captured: the job's model if it has been captured before.
        cuts: ``measured`` (the default) on this machine, ``roofline`` (predicted alike on every machine), ``equal``
            (numbers of operations), or names: of the operations that end the stages, with commas between them, or of
            those that end the segments of every stage, in a list for each.
        choices: ``micro_batches``, ``predictor``, ``backward``, ``recompute``, ``compile``, ``precision``,
            ``loss_scale``, ``clip``, ``ema``, ``transport``, ``deadline_s``, ``devices``.

    Raises:
        CaptureError: the model cannot be captured, or not be cut into so many stages.
        PlanError: the choices do not go together.
        DeadlineError: a batch did not come within ``deadline_s``.
    """
    return plan_with_reasons(job, workers=workers, rule=rule, seed=seed, captured=captured, cuts=cuts, **choices).plan


def captured_and_planned(
    function: Callable[..., Any], job: Job, plan: Plan | None, seed: int, choices: Mapping[str, Any]
) -> tuple[Captured, Plan]:
    """The job's model, and the plan that was given to a function, or one that is made by the choices given to it.

    Args:
        function: what was called, to name it in an error.
        job: the job.
        plan: the plan, or None.
        seed: of the data.
        choices: as for :func:`plan`, ``workers``, ``rule`` and ``cuts`` among them; None is no choice.

    Raises:
        TypeError: a choice is unknown.
        UsageError: a plan was given beside a choice.
    """
    check_choices(function, choices, ("workers", "rule", "cuts", *CHOICES))
    given = {name: value for name, value in choices.items() if value is not None}
    if plan is None:
        captured = capture(job, seed=seed, deadline_s=given.get("deadline_s", DEADLINE_S))
        return captured, plan_with_reasons(job, captured=captured, seed=seed, **given).plan
    if given:
        names, call = ", ".join(given), ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UsageError(
            f"plan beside {names} in roundelay.{function.__name__}",
            got=f"a plan, and {call}",
            expected="one of them: a plan says all that can be chosen",
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
    cuts: Asked | None = None,
    tell: Tell = silent,
    **choices: Any,
) -> Planned:
    """As :func:`plan`, with the reasons for the cuts; ``tell`` is told of long waits for the loader."""
    check_choices(plan, choices)
    given = {name: value for name, value in choices.items() if value is not None}
    if job.ema is not None:
        given.setdefault("ema", job.ema)
    deadline_s = given.setdefault("deadline_s", DEADLINE_S)
    check_deadline(deadline_s)
    captured = captured or capture(job, seed=seed, deadline_s=deadline_s, tell=tell)
    asked = MEASURED if cuts is None else cuts
    stages = given_stages(captured.graph, asked)
    schedule = schedule_named(rule_named(rule).schedule)
    num_stages, fewer = _num_stages(captured.graph, workers, stages, rule)
    num_workers = num_stages // schedule.stages_per_worker
    draft = _draft(captured.graph.fingerprint, rule, num_workers, given)
    with untouched(job):
        parts = choose_parts(
            captured,
            rule_named(rule),
            draft.micro_batches,
            lambda: first_batches(job.batches, seed, LOOKED_AT, deadline_s, budget_s=1.0),
            asked="micro_batches" in given,
        )
    draft = replace(draft, micro_batches=parts.micro_batches)
    draft = replace(draft, recompute=names_for(captured, draft.backward, given.get("recompute")))
    devices = named(given.get("devices"), num_workers, draft.transport)
    captured = for_plan(captured, draft)
    chosen = (
        Cut(stages, ("cuts: as given",))
        if stages is not None
        else _cut(job, captured, draft, str(asked), num_stages, lambda: _sample(job, captured.graph, draft, seed, tell))
    )
    workers_ = tuple(WorkerPlan(name=f"w{k}", device=device) for k, device in enumerate(devices))
    home = [workers_[worker].name for worker in schedule.place(num_stages)]
    cut_up = replace(draft, workers=workers_, stages=_uncounted(chosen.stages, home))
    made, told = _measured(job, captured, cut_up, seed, tell, asked="recompute" in given)
    heard = tuple(reason for reason in (fewer, parts.told) if reason)
    return Planned(made, (*heard, *chosen.reasons, *told), heard)


def check_choices(function: Callable[..., Any], choices: Mapping[str, Any], known: Sequence[str] = CHOICES) -> None:
    """Refuse a keyword that a function with further choices does not know, as Python refuses one without.

    Raises:
        TypeError: naming it, and those that it may have been meant for.
    """
    for name in choices:
        if name not in known:
            own = [one.name for one in signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
            names = list(dict.fromkeys([*own, *known]))
            near = difflib.get_close_matches(name, names, n=3)
            told = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it knows {', '.join(names)}"
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}; {told}")


def _num_stages(graph: Graph, workers: int | None, stages: Stages | None, rule: str) -> tuple[int, str]:
    """As many as the workers ask for, or as were given; and why there are fewer than usual, if so."""
    if workers is not None and workers < 1:
        raise PlanError("workers", got=str(workers), expected="at least 1", remedy="Give --workers 1 or more.")
    each = schedule_named(rule_named(rule).schedule).stages_per_worker
    if stages is None:
        return _chosen_number(len(boundaries_of(graph)) - 1, workers, each, rule)
    if len(stages) % each or workers not in (None, len(stages) // each):
        wanted = f"{each} for each worker" if workers is None else f"{each * workers}, {each} for each worker"
        raise PlanError(
            "the cuts",
            got=f"{len(stages)} stages",
            expected=wanted if each > 1 else f"{workers}, one for each worker",
            remedy="Name one operation fewer than there are stages, or leave the number of workers out.",
        )
    return len(stages), ""


def _chosen_number(pieces: int, workers: int | None, each: int, rule: str) -> tuple[int, str]:
    """Stages for so many workers, or for as many as is usual and the model has pieces for.

    Raises:
        CaptureError: the model has too few.
    """
    most = pieces // each
    wanted = default_workers() if workers is None else workers
    if wanted <= most:
        return each * wanted, ""
    limit = f"can be cut into {counted(pieces, 'stage')} at most"
    if workers is None and most:
        return each * most, f"{counted(most, 'worker')}, not {wanted}: the model {limit}"
    apart = f", {each} for each worker by {rule}" if each > 1 else ""
    raise CaptureError(
        f"a cut into {each * wanted} stages, for {counted(wanted, 'worker')}",
        got=f"a model that {limit}",
        expected=f"at least {each * wanted} stages{apart}",
        remedy=f"Give --workers {most}, or a model of more operations."
        if most
        else "Give another rule: --rule 1f1b, for example, has one stage for each worker.",
    )


def _draft(model: str, rule: str, workers: int, given: Mapping[str, Any]) -> Plan:
    """The plan without stages and edges."""
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
        micro_batches=given.get("micro_batches", 2 * workers if flushes else workers if wants_parts(row) else 1),
        transport=transport,
        deadline_s=given["deadline_s"],
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        read_s=0.0,
        workers=(),
        stages=(),
        edges=(),
    )


def _uncounted(stages: Stages, workers: Sequence[str]) -> tuple[StagePlan, ...]:
    """Stages of which only the ends and the workers are known yet."""
    nothing: dict[str, Any] = dict.fromkeys(("forward_s", "backward_s", "weights_s", "update_s"), 0.0)
    nothing |= dict.fromkeys(("parameter_bytes", "tape_bytes", "owed_bytes"), 0)
    return tuple(StagePlan(workers=(on,), segments=ends, **nothing) for ends, on in zip(stages, workers, strict=True))


def _cut(job: Job, captured: Captured, draft: Plan, asked: str, num_stages: int, sample: Callable[[], Batch]) -> Cut:
    terms = CostParameters(
        again=again(captured.graph, draft),
        micro_batches=draft.micro_batches,
        latency_s=draft.latency_s,
        bytes_per_s=draft.bytes_per_s,
    )
    with untouched(job):
        return cut(captured, asked, num_stages, terms, sample)


def _sample(job: Job, graph: Graph, draft: Plan, seed: int, tell: Tell) -> Batch:
    """The first micro-batch of the size that will be trained on."""
    return split(first_batch(job.batches, seed, draft.deadline_s, tell), max(1, draft.micro_batches), graph.min_rows)[0]


def fitted(captured: Captured, plan: Plan) -> Partition:
    """The stages of a plan that fits the captured model, proved.

    Raises:
        PlanError: it does not fit, or cannot be obeyed.
    """
    check_plan(plan)
    ours = plan.model == captured.graph.fingerprint  # cuts of another model mean nothing in this one
    stages = (
        partition(captured.graph, [stage.segments for stage in plan.stages], plan.recompute) if ours else Partition(())
    )
    check_fit(plan, captured.graph.fingerprint, stages)
    prove(plan)
    return stages


def _measured(
    job: Job, captured: Captured, draft: Plan, seed: int, tell: Tell, *, asked: bool
) -> tuple[Plan, tuple[str, ...]]:
    """The draft with edges, measured seconds and bytes; and what is spared by running modules again, in words."""
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
        with users_code("measuring the stages on the first micro-batch"), one_thread(), untouched(job):
            return profile(captured, stages, sample, draft.backward, devices, halved=halved)  # type: ignore[arg-type]

    measured = profiles() if set(draft.devices) != {CPU} else _apart(profiles)
    with users_code("measuring the loader"), one_thread():
        read: list[Batch] = []
        least, look = captured.graph.min_rows, read.append
        read_s = reading_s(job.batches, seed, draft.micro_batches, draft.deadline_s, tell, look, min_rows=least)
        with untouched(job):
            for micro_batch in read:
                captured.check_numbers(micro_batch)
    captured.settings.check()  # the loader has been read
    made = replace(checked, stages=_stages(captured.graph, draft, stages, measured), read_s=_round(read_s))
    prove(made)
    return made, spared(captured.graph, draft, stages, measured, asked=asked)


def _apart(profiles: Callable[[], list[StageProfile]]) -> list[StageProfile]:
    """The profiles, measured where no later fork is spoilt."""
    rows = apart(lambda: [asdict(one) for one in profiles()], "measuring the stages on the first micro-batch")
    return [StageProfile(**{**row, "spared_bytes": tuple(row["spared_bytes"])}) for row in rows]


def _stages(graph: Graph, draft: Plan, stages: Partition, measured: Sequence[StageProfile]) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            workers=stage.workers,
            segments=stage.segments,
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
    """Microseconds are as much as a measurement says."""
    return round(seconds, 6)


def _edge(graph: Graph, edge: Edge, draft: Plan, schedule: Schedule) -> EdgePlan:
    room = slots(edge.source, edge.target) if schedule.stages_per_worker == 1 else draft.num_stages
    return EdgePlan(
        source=edge.source,
        target=edge.target,
        slots=room,
        forward_bytes=message_bytes(graph, edge.values, draft.micro_batches),
        backward_bytes=message_bytes(graph, edge.gradients, draft.micro_batches),
        gradient=bool(edge.gradients),
    )


def explain(captured: Captured, plan: Plan, reasons: Sequence[str] = ()) -> list[str]:
    """Comments for the plan's text: what it says, in words, and the reasons for its cuts if they are known."""
    rule = rule_named(plan.rule)
    home, size = plan.stage_workers, plan.num_workers
    lines = [
        f"{type(captured.model).__name__} on {counted(size, 'worker')} by rule {plan.rule} ({rule.source}).",
        f"{counted(len(captured.graph.ops), 'operation')}, {counted(len(captured.graph.cuts), 'place')} to cut.",
    ]
    for k, stage in enumerate(plan.stages):
        ends = ", ".join(f"{end} ({_module(captured.graph, end)})" for end in stage.segments)
        where = "" if home == tuple(range(size)) else f", worker {home[k]}"
        where += "" if plan.devices[k] == CPU else f" on {plan.devices[k]}"
        lines.append(f"stage {k}{where}: up to {ends}; {stage.parameter_bytes / 1e6:.2f} MB of weights")
    for edge in plan.edges:
        lines.append(f"{edge.source}>{edge.target}: {edge.forward_bytes} bytes forward, {edge.backward_bytes} back")
    if plan.read_s:
        lines.append(_reading(plan))
    lines += meaning(captured, plan)
    if plan.compile:
        lines.append("compile: for the shapes of the first batch; micro-batches of other shapes are computed without")
    if plan.precision == HALF:
        flushes = schedule_named(rule.schedule).window == "batch"
        who, where = ("every stage", "anywhere") if flushes else ("a stage", "there")
        lines.append(f"fp16: {who} skips the update of a batch whose gradients are not finite {where}")
    if rule.predicts and plan.backward == "stash":
        lines.append("stash: stage k holds up to D-1-k predicted copies of its weights beside the live one")
    if far := _far(plan, rule):
        lines.append(far)
    return [*lines, *reasons]


def _reading(plan: Plan) -> str:
    """What the loader takes, and whether it sets the rate."""
    again = plan.backward == "recompute"
    slowest = max(s.forward_s * (1 + again) + s.backward_s + s.weights_s for s in plan.stages)
    told = f"data: {plan.read_s * 1e3:.3g} ms per micro-batch, loaded by a thread of worker 0 while the stages compute"
    if plan.read_s <= slowest:
        return told
    passes = f"{slowest * 1e3:.3g} ms (forward_s + backward_s)"
    return f"{told}; warning: no stage takes more than {passes}, so the loader sets the rate"


FAR = 7
"""Updates crossed at which rules were seen to fail (benchmarks/depth)."""


def _far(plan: Plan, rule: UpdateRule) -> str:
    """A warning where weights are so many updates old that rules were seen to fail."""
    crossed = -(-(plan.num_stages - 1) // plan.micro_batches)
    if schedule_named(rule.schedule).window == "batch" or rule.versions == "table" or crossed < FAR:
        return ""
    return (
        f"warning: stage 0 runs {crossed} updates behind, where training was seen to fail; give "
        f"--micro-batches {plan.num_stages - 1} or more, which leaves 1, best with --rule rehearse"
    )


def _module(graph: Graph, name: str) -> str:
    op = graph.ops[graph.index(name)]
    return f"{op.module or 'the model'}, {op.target}"
