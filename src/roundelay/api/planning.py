"""Capture a job, and plan it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from roundelay import simulator
from roundelay.api.check_here import check_here, refuse_launched
from roundelay.api.compile_stages import compile_stages, for_plan
from roundelay.api.cuts import MEASURED, Cut, CutRequest, Stages, cut, cut_by_names
from roundelay.api.default_choices import faster, workers_are_open
from roundelay.api.draft_plan import TENSOR, default_rule, draft_plan
from roundelay.api.given_layout import has_size, in_layout, owners_of
from roundelay.api.holder_choices import parts_of, replicas_of, signatures_of, zero_of
from roundelay.api.layout_choices import num_stages_of, slots_in_layout
from roundelay.api.memory_limit import check_memory
from roundelay.api.num_micro_batches import EXAMINED_BATCHES, check_counts, choose_micro_batches
from roundelay.api.plan_exchanges import check_exchanges, plan_exchanges
from roundelay.api.plan_signatures import on_mesh, split_states, tensor_parallel
from roundelay.api.recompute_choice import choose_modules, describe_savings
from roundelay.api.statelessness import check_metrics, check_sharing, check_stateless, preserving_state, refusing_calls
from roundelay.api.torch_scope import in_child, on_all_threads, on_threads, user_code, without_dumps
from roundelay.api.validate_job import check_evaluated, check_inputs, check_job
from roundelay.api.weights_file import check_filled, fill
from roundelay.cores import threads_each
from roundelay.errors import PlanError, UsageError
from roundelay.frontend import Captured
from roundelay.frontend import capture as capture_model
from roundelay.frontend.batch import Batch, split
from roundelay.frontend.model_call import train as train_mode
from roundelay.frontend.stage_profiler import StageProfile, profile
from roundelay.ir.graph import Graph
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import REPLICAS, EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import rule_named
from roundelay.ir.stage import Edge, Partition
from roundelay.job import Job
from roundelay.lower.boxed_graph import segment_ends
from roundelay.lower.channels import schedule_of
from roundelay.lower.dataflow import message_bytes
from roundelay.lower.partition import partition
from roundelay.lower.validate_plan import CPU, check_deadline, check_fit, check_plan
from roundelay.lower.verify_schedule import programs_of
from roundelay.planner.partition_dp import slots
from roundelay.planner.prove_plan import prove
from roundelay.runtime.device import resolve_devices
from roundelay.runtime.loader_probe import DEADLINE_S, first_batch, first_batches, reading_s
from roundelay.runtime.lr_schedule_check import check_reproducible
from roundelay.runtime.prefetch import OnWait, ignore_wait
from roundelay.schedules import PIPELINE, Schedule, schedule_for

DIGITS = 6
"""Decimals of measured seconds in a plan: microseconds."""

CHOICES = (
    "layout",
    "stages",
    "data_parallel",
    "tensor_parallel",
    "signatures",
    "zero",
    "micro_batches",
    "predictor",
    "backward",
    "recompute",
    "compile",
    "precision",
    "loss_scale",
    "clip",
    "ema",
    "deterministic",
    "transport",
    "deadline_s",
    "devices",
    "threads",
    "memory_limit",
)


def capture(job: Job, *, seed: int = 0, deadline_s: float = DEADLINE_S, tell: OnWait = ignore_wait) -> Captured:
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
    with on_all_threads():
        with refusing_calls(job.model):
            sample = first_batch(job.batches, seed, deadline_s, tell)
        train_mode(job.model)
        with preserving_state(job):
            return _captured(job, sample)


def _captured(job: Job, sample: Batch) -> Captured:
    with preserving_state(job):
        check_inputs(job, sample)
    with without_dumps():
        captured = capture_model(job.model, job.loss, sample, job.inputs)
    captured = replace(captured, metric_state=check_stateless(job, captured, sample))
    check_sharing(job, captured)
    check_counts(captured, sample)
    if check_reproducible(job).waits:
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
    rule: str | None = None,
    seed: int = 0,
    captured: Captured | None = None,
    cuts: CutRequest | None = None,
    **choices: Any,
) -> Plan:
    """Plan a job: choose everything that is not given, measure the stages, and prove the resulting plan.

    Args:
        job: the job.
        workers: D, of each replica; each gets one stage, or two with a rule such as ``zb-v``. By default one per GPU;
            on the CPU one with all threads or two with half of them each, whichever is faster.
        rule: update rule; by default ``1f1b``, which trains as plain PyTorch does, or ``cdp-v2`` in a layout.
        seed: of the sample batch.
        captured: the job's model if it has been captured already.
        cuts: ``measured`` on this machine (the default), ``roofline`` (predicted, the same on every machine), ``equal``
            (numbers of operations), or names of operations: comma-separated, those that end the stages, or a list for
            each stage of those that end its segments.
        choices: ``layout`` (``pipeline``, ``single``, ``dp``, ``mp`` or ``zero``), ``stages`` (of the latter),
            ``data_parallel``, ``tensor_parallel``, ``signatures`` (a file, or what it says:
            :mod:`roundelay.ir.given_signatures`), ``zero``, ``micro_batches``, ``predictor``, ``backward``,
            ``recompute``, ``compile``, ``precision``, ``loss_scale``, ``clip``, ``ema``, ``deterministic``,
            ``transport``, ``deadline_s``, ``devices``, ``threads`` (intra-op threads of each worker), ``memory_limit``
            (bytes of each worker, such as ``"8GiB"``, beyond which the plan is refused).

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
        check_here(given)
    refuse_launched(given.get("transport", "memory") if plan is None else plan.transport)
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
    rule: str | None = None,
    seed: int = 0,
    captured: Captured | None = None,
    cuts: CutRequest | None = None,
    tell: OnWait = ignore_wait,
    **choices: Any,
) -> Planned:
    """As :func:`plan`, with the reasons for its choices; ``tell`` is called when waiting for the loader takes long."""
    check_choices(plan, choices)
    given = {name: value for name, value in choices.items() if value is not None}
    check_here(given | {"workers": workers, "rule": rule})
    if job.ema is not None:
        given.setdefault("ema", job.ema)
    deadline_s = given.setdefault("deadline_s", DEADLINE_S)
    rule = rule or default_rule(given.get("layout", PIPELINE))
    captured = captured or capture(job, seed=seed, deadline_s=deadline_s, tell=tell)
    cuts = MEASURED if cuts is None else cuts
    given_cut = cut_by_names(captured.graph, cuts)
    if workers is not None:
        given["workers"] = workers
    wish = _Wish(job, captured, rule, seed, cuts, given_cut, tell, in_layout(given), given)
    if not workers_are_open(rule, given if given_cut is None else given | {"cuts": cuts}):
        return _measured(wish, _drafted(wish, workers))
    return _faster(wish)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is asked of a plan.

    Args:
        job: the job.
        captured: its model.
        rule: update rule.
        seed: of the sample batch.
        cuts: how cuts are chosen.
        given_cut: the cut, if it is given by names.
        tell: called when waiting for the loader takes long.
        given: the choices that are given, as they are in their layout.
        asked: the same as they were given.
    """

    job: Job
    captured: Captured
    rule: str
    seed: int
    cuts: CutRequest
    given_cut: Cut | None
    tell: OnWait
    given: dict[str, Any]
    asked: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A plan without stages and edges.

    Args:
        plan: with its workers.
        owners: for each stage, the numbers of the workers that hold it.
        notices: for the user.
    """

    plan: Plan
    owners: Sequence[Sequence[int]]
    notices: tuple[str, ...]


def _faster(wish: _Wish) -> Planned:
    """One worker with all threads, or two with half of them, whichever is predicted to take less time."""
    two = _drafted(wish, None)
    if two.plan.micro_batches == 1:  # two workers would take turns
        one = _drafted(wish, 1)
        return _measured(wish, replace(one, notices=(*two.notices, *one.notices)))
    several = _measured(wish, two)
    one_planned = _measured(wish, _drafted(wish, 1))
    taken, why = faster(one_planned.plan, several.plan)
    planned = one_planned if taken is one_planned.plan else several
    return replace(planned, reasons=(why, *planned.reasons), notices=(why, *planned.notices))


def _drafted(wish: _Wish, workers: int | None) -> _Draft:
    """Choose everything but the cuts, and measure nothing yet."""
    given, rule, captured = wish.given, rule_named(wish.rule), wish.captured
    sized, staged = has_size(wish.asked), "stages" in wish.asked
    replicas, parts = replicas_of(given), parts_of(given)
    num_stages, fewer = num_stages_of(captured.graph, workers, wish.given_cut, rule.name, given, requested=staged)
    schedule = schedule_for(rule, given.get("layout", PIPELINE), num_stages=num_stages)
    each = len(set(schedule.place(num_stages)))
    draft = _with_signatures(draft_plan(captured.graph.fingerprint, rule.name, each, given), captured, given)
    with preserving_state(wish.job):
        choice = choose_micro_batches(
            captured,
            rule,
            draft.micro_batches,
            lambda: first_batches(wish.job.batches, wish.seed, EXAMINED_BATCHES, draft.deadline_s, budget_s=1.0),
            requested="micro_batches" in given and sized,
            replicas=replicas,
            dealt=not sized,
        )
    recompute = choose_modules(captured, draft.backward, given.get("recompute"))
    draft = replace(draft, micro_batches=choice.micro_batches, recompute=recompute)
    owners, size = owners_of(schedule, draft.layout, num_stages, (replicas, parts, draft.micro_batches))
    placed = _workers(resolve_devices(given.get("devices"), size, draft.transport), given.get("threads"))
    notices = tuple(notice for notice in (fewer, choice.notice) if notice)
    return _Draft(replace(draft, workers=placed), owners, notices)


def micro_batch_notice(job: Job, captured: Captured, plan: Plan, seed: int) -> str:
    """What it changes that a plan cuts batches into micro-batches; empty if nothing.

    Raises:
        PlanError: the plan has replicas, and the first batch cannot be dealt out to them.
    """
    with on_threads(plan.threads), preserving_state(job):
        return choose_micro_batches(
            captured,
            rule_named(plan.rule),
            plan.micro_batches,
            lambda: first_batches(job.batches, seed, EXAMINED_BATCHES, plan.deadline_s, budget_s=1.0),
            requested=True,
            replicas=plan.replicas,
        ).notice


def _measured(wish: _Wish, drafted: _Draft) -> Planned:
    """Choose the cuts, and measure the stages."""
    job, given, draft, owners = wish.job, wish.given, drafted.plan, drafted.owners
    whole = for_plan(wish.captured, replace(draft, mesh={}, parameters={}, outputs={}))
    sample = partial(_sample, job, whole.graph, draft, wish.seed, wish.tell)
    with preserving_state(job):
        chosen = wish.given_cut or cut(whole, draft, str(wish.cuts), len(owners), sample)
    captured = on_mesh(whole, draft)
    if zero_of(given):
        given_states = split_states(captured, draft.replicas)
        draft = replace(draft, states={name: ((REPLICAS, str(split)),) for name, split in given_states.items()})
        captured = on_mesh(whole, draft)
    ends = chosen.stages
    if captured.sharding is not None:
        ends = tuple(map(tuple, segment_ends(captured.graph, ends, captured.boxes)))
    names = [[draft.workers[worker].name for worker in own] for own in owners]
    draft = replace(draft, stages=_unmeasured(ends, names))
    result, savings = _measure(job, captured, draft, wish.seed, wish.tell, requested="recompute" in given)
    if (limit := given.get("memory_limit")) is not None:
        check_memory(job, whole, result, limit)
    return Planned(result, (*drafted.notices, *chosen.reasons, *savings), drafted.notices)


def _workers(devices: Sequence[str], threads: int | None) -> tuple[WorkerPlan, ...]:
    """The workers of a plan.

    Args:
        devices: where each computes.
        threads: of each, as given; by default those on the CPU share this host's cores, and one leads a GPU.
    """
    shared = threads_each(len(devices), torch.get_num_threads)
    counts = [(shared if device == CPU else 1) if threads is None else threads for device in devices]
    named = enumerate(zip(devices, counts, strict=True))
    return tuple(WorkerPlan(name=f"w{k}", device=device, threads=count) for k, (device, count) in named)


def _with_signatures(draft: Plan, captured: Captured, given: Mapping[str, Any]) -> Plan:
    """The draft with the given signatures, or those that `tensor_parallel` asks for."""
    own, parts = signatures_of(given), parts_of(given)
    if own is not None:
        return replace(draft, mesh=own.mesh, parameters=own.parameters, outputs=own.outputs)
    if parts == 1:
        return draft
    pairs = {name: ((TENSOR, str(signature)),) for name, signature in tensor_parallel(captured, parts).items()}
    return replace(draft, mesh={TENSOR: parts}, parameters=pairs)


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


def _unmeasured(stages: Stages, owners: Sequence[Sequence[str]]) -> tuple[StagePlan, ...]:
    """Return stages with their ends and workers, and zeros for what is measured later."""
    nothing: dict[str, Any] = dict.fromkeys(("forward_s", "backward_s", "weights_s", "update_s"), 0.0)
    nothing |= dict.fromkeys(("parameter_bytes", "tape_bytes", "owed_bytes"), 0)
    return tuple(
        StagePlan(workers=tuple(on), segments=ends, **nothing) for ends, on in zip(stages, owners, strict=True)
    )


def _sample(job: Job, graph: Graph, draft: Plan, seed: int, tell: OnWait) -> Batch:
    """The first micro-batch of the size that will be trained on."""
    return split(first_batch(job.batches, seed, draft.deadline_s, tell), max(1, draft.batch_parts), graph.min_rows)[0]


def fitted(captured: Captured, plan: Plan) -> Partition:
    """Check a plan against the captured model, prove it, and return its stages.

    Raises:
        PlanError: it does not fit the model, or cannot be executed.
    """
    check_plan(plan)
    ours = plan.model == captured.graph.fingerprint  # cuts of another model mean nothing in this one
    ends = [stage.segments for stage in plan.stages]
    stages = partition(captured.graph, ends, plan.recompute) if ours else Partition(())
    check_fit(plan, captured.graph.fingerprint, stages)
    check_exchanges(captured, stages, plan)
    check_metrics(captured, plan)
    prove(plan)
    return stages


def without_mesh(captured: Captured, plan: Plan) -> Plan:
    """The plan with each stage of a replica on one worker, cut at the same places.

    Args:
        captured: the model, on no mesh.
        plan: any.
    """
    boxed, known, size = on_mesh(captured, plan).graph, {op.name for op in captured.graph.ops}, plan.mesh_size
    before: dict[str, str] = {}  # the last operation of the model up to each one
    for op in boxed.ops:
        before[op.name] = op.name if op.name in known else next(reversed(before.values()))
    stages: list[StagePlan] = []
    for stage in plan.stages:  # a boxing at its beginning is none of its segments
        past = stages[-1].segments[-1:] if stages else ()
        ends = tuple([end for end in dict.fromkeys(before.get(n, n) for n in stage.segments) if end not in past])
        stages.append(replace(stage, segments=ends, workers=stage.workers[::size]))
    named = {name for stage in stages for name in stage.workers}
    workers = tuple(worker for worker in plan.workers if worker.name in named)
    result = replace(plan, mesh={}, parameters={}, outputs={}, states={}, stages=tuple(stages), workers=workers)
    cut_up = partition(captured.graph, [stage.segments for stage in stages], plan.recompute)
    unused = [next((e.unused for e in plan.exchanges if e.stage == k), ()) for k in range(plan.num_stages)]
    return replace(result, exchanges=plan_exchanges(captured, cut_up, result, unused))


def _measure(
    job: Job, captured: Captured, draft: Plan, seed: int, tell: OnWait, *, requested: bool
) -> tuple[Plan, tuple[str, ...]]:
    """Return the draft with edges and measurements; and what recomputing modules saves, in words."""
    stages = partition(captured.graph, [stage.segments for stage in draft.stages], draft.recompute)
    sample = _sample(job, captured.graph, draft, seed, tell)
    schedule = schedule_of(draft)
    draft = replace(
        draft,
        input_bytes=message_bytes(captured.graph, (*captured.graph.inputs, *captured.graph.batch), draft.batch_parts),
        edges=tuple(_edge(captured.graph, edge, draft, schedule) for edge in stages.edges),
        exchanges=plan_exchanges(captured, stages, draft),
    )
    check_plan(draft)
    devices = [torch.device(draft.device_of(stage)) for stage in range(draft.num_stages)]
    what = "measuring the stages on the first micro-batch"

    def profiles() -> list[StageProfile]:
        compile_stages(job, captured, draft, stages, seed)
        with on_threads(draft.threads), user_code(what), preserving_state(job):
            return profile(captured, stages, sample, draft.backward, devices, halved=schedule.halved)  # type: ignore[arg-type]

    measured = profiles() if set(draft.devices) != {CPU} else in_child(profiles, what, list[StageProfile])
    with user_code("measuring the loader"):
        read: list[Batch] = []
        rows, look = captured.graph.min_rows, read.append
        read_s = reading_s(job.batches, seed, draft.batch_parts, draft.deadline_s, tell, look, min_rows=rows)
        with preserving_state(job):
            for micro_batch in read:
                captured.inputs.check_numbers(micro_batch)
    captured.settings.check()  # the loader may have changed the model
    result = replace(
        draft,
        stages=_stages(captured.graph, draft, stages, measured),
        read_s=round(read_s, DIGITS),
        exchanges=plan_exchanges(captured, stages, draft, [part.unused for part in measured]),
    )
    prove(result)
    return result, describe_savings(captured.graph, draft, stages, measured, requested=requested)


def _stages(graph: Graph, draft: Plan, stages: Partition, measured: Sequence[StageProfile]) -> tuple[StagePlan, ...]:
    return tuple(
        replace(
            stage,
            forward_s=round(part.forward_s, DIGITS),
            backward_s=round(part.backward_s, DIGITS),
            weights_s=round(part.weights_s, DIGITS),
            update_s=round(part.update_s, DIGITS),
            parameter_bytes=sum(graph.parameters[n].num_bytes for n in spec.parameters),
            tape_bytes=part.tape_bytes,
            owed_bytes=part.owed_bytes,
        )
        for stage, spec, part in zip(draft.stages, stages.stages, measured, strict=True)
    )


def _edge(graph: Graph, edge: Edge, draft: Plan, schedule: Schedule) -> EdgePlan:
    num_slots = slots(edge.source, edge.target) if schedule.stages_per_worker == 1 else draft.num_stages
    if draft.layout != PIPELINE:
        num_slots = slots_in_layout(draft, edge.source, edge.target)
    return EdgePlan(
        source=edge.source,
        target=edge.target,
        slots=num_slots,
        forward_bytes=message_bytes(graph, edge.values, draft.batch_parts),
        backward_bytes=message_bytes(graph, edge.gradients, draft.batch_parts),
        gradient=bool(edge.gradients),
    )


def read_plan(path: Path, remedy: str = "Write one with `roundelay plan JOB.py -o plan.toml`.") -> Plan:
    """Read a plan from a file.

    Args:
        path: the file.
        remedy: what to do if it cannot be read.

    Raises:
        PlanError: it cannot be read, or is not a plan.
    """
    try:
        return Plan.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"plan file {path}",
            got=str(error),
            expected="a plan as `roundelay plan` writes it",
            remedy=remedy,
        ) from error


def simulate(plan: Plan, *, batches: int = 8) -> simulator.Simulation:
    """Simulate ``batches`` full batches.

    Raises:
        PlanError: the plan cannot be executed.
    """
    prove(plan)
    return simulator.simulate(plan, programs_of(plan), stream([plan.micro_batches] * batches))
