"""Make a plan: choose what is not given, measure the stages, and prove the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from roundelay.cores import threads_each
from roundelay.errors import counted
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, split
from roundelay.frontend.export.gradient_hooks import uncalled
from roundelay.guards.statelessness import preserving_state
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import Graph
from roundelay.ir.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import rule_named
from roundelay.ir.stage import Edge, Partition
from roundelay.job import Job
from roundelay.lower.boxed_graph import segment_ends
from roundelay.lower.dataflow import message_bytes
from roundelay.lower.partition import partition
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_plan
from roundelay.planner.choices import Choices
from roundelay.planner.draft_plan import PLAIN, TENSOR, draft_plan
from roundelay.planner.given_layout import has_size, owners_of
from roundelay.planner.holder_choices import parts_of, replicas_of, signatures_of, zero_of
from roundelay.planner.partition_dp import slots
from roundelay.planner.prove_plan import prove
from roundelay.planning.compile_stages import compile_stages, for_plan
from roundelay.planning.cuts import Cut, Stages, cut
from roundelay.planning.default_choices import choose_faster
from roundelay.planning.layout_choices import num_stages_of, slots_in_layout
from roundelay.planning.memory_limit import check_memory
from roundelay.planning.num_micro_batches import EXAMINED_BATCHES, MicroBatchChoice, choose_micro_batches
from roundelay.planning.plan_exchanges import plan_exchanges
from roundelay.planning.plan_signatures import on_mesh, tensor_parallel
from roundelay.planning.recompute_choice import choose_modules, describe_savings
from roundelay.planning.split_states import split_states
from roundelay.planning.stage_profiler import StageProfile, profile
from roundelay.planning.torch_scope import in_child, on_threads, user_code
from roundelay.runtime.device import resolve_devices
from roundelay.runtime.loading.loader_probe import first_batch, first_batches, reading_s
from roundelay.runtime.loading.prefetch import OnWait
from roundelay.schedules import PIPELINE, Schedule, schedule_for

DIGITS = 6
"""Decimals of measured seconds in a plan: microseconds."""


_IN_TURNS = "several would compute whole batches in turns"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the reasons for its choices in words.

    Args:
        plan: the plan.
        reasons: all of them.
        notices: those that are always shown to the user: fewer workers or micro-batches than the default, or training
            that differs from that of whole batches.
        warnings: those of the notices that say that something else than whole batches is trained.
    """

    plan: Plan
    reasons: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked of a plan.

    Args:
        job: the job.
        captured: its model.
        seed: of the sample batch.
        given_cut: the cut, if it is given by names.
        tell: called when waiting for the loader takes long.
        choices: with the rule and the way to cut, as they are in their layout.
        asked: the same as they were given.
    """

    job: Job
    captured: Captured
    seed: int
    given_cut: Cut | None
    tell: OnWait
    choices: Choices
    asked: Choices


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan without stages and edges.

    Args:
        plan: with its workers.
        owners: for each stage, the numbers of the workers that hold it.
        notices: for the user.
        warnings: those that say that something else than whole batches is trained.
    """

    plan: Plan
    owners: Sequence[Sequence[int]]
    notices: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_one_or_two_workers(request: PlanRequest) -> Planned:
    """One worker with all threads, or two with half of them, whichever is predicted to take less time."""
    two = drafted(request, None)
    if two.plan.micro_batches == 1:  # two workers would take turns
        one = drafted(request, 1)
        why = f"1 worker of {counted(one.plan.threads, 'thread')}: {_IN_TURNS}"
        told = [why] if two.plan.num_workers > 1 else []
        return measured_plan(request, replace(one, notices=(*two.notices, *one.notices, *told)))
    several = measured_plan(request, two)
    one_planned = measured_plan(request, drafted(request, 1))
    taken, why = choose_faster(one_planned.plan, several.plan)
    planned = one_planned if taken is one_planned.plan else several
    return replace(planned, reasons=(why, *planned.reasons), notices=(why, *planned.notices))


def drafted(request: PlanRequest, workers: int | None) -> Draft:
    """Choose everything but the cuts, and measure nothing yet."""
    choices, captured = request.choices, request.captured
    rule, sized, staged = rule_named(choices.rule or PLAIN), has_size(request.asked), request.asked.stages is not None
    replicas, parts = replicas_of(choices), parts_of(choices)
    num_stages, fewer = num_stages_of(captured.graph, workers, request.given_cut, choices, requested=staged)
    schedule = schedule_for(rule, choices.layout or PIPELINE, num_stages=num_stages)
    each = len(set(schedule.place(num_stages)))
    draft = _with_signatures(draft_plan(captured.graph.fingerprint, rule.name, each, choices), captured, choices)
    with preserving_state(request.job), uncalled(request.job.model):
        choice = choose_micro_batches(
            captured,
            rule,
            draft.micro_batches,
            lambda: first_batches(request.job.loader, request.seed, EXAMINED_BATCHES, draft.deadline_s, budget_s=1.0),
            requested=choices.micro_batches is not None and sized,
            replicas=replicas,
            dealt=not sized,
        )
    recompute = choose_modules(captured, draft.backward, choices.recompute)
    draft = replace(draft, micro_batches=choice.micro_batches, recompute=recompute)
    owners, size = owners_of(schedule, draft.layout, num_stages, (replicas, parts, draft.micro_batches))
    placed = _workers(resolve_devices(choices.devices, size, draft.transport), choices.threads)
    notices = tuple(notice for notice in (fewer, choice.notice) if notice)
    return Draft(replace(draft, workers=placed), owners, notices, (choice.notice,) if choice.otherwise else ())


def micro_batch_notice(job: Job, captured: Captured, plan: Plan, seed: int) -> MicroBatchChoice:
    """What it changes that a plan cuts batches into micro-batches.

    Raises:
        PlanError: the plan has replicas, and the first batch cannot be dealt out to them.
    """
    with on_threads(plan.threads), preserving_state(job), uncalled(job.model):
        return choose_micro_batches(
            captured,
            rule_named(plan.rule),
            plan.micro_batches,
            lambda: first_batches(job.loader, seed, EXAMINED_BATCHES, plan.deadline_s, budget_s=1.0),
            requested=True,
            replicas=plan.replicas,
        )


def measured_plan(request: PlanRequest, draft_of: Draft) -> Planned:
    """Choose the cuts, and measure the stages."""
    job, choices, draft, owners = request.job, request.choices, draft_of.plan, draft_of.owners
    whole = for_plan(request.captured, replace(draft, mesh={}, parameters={}, outputs={}))
    sample = partial(_sample, job, whole.graph, draft, request.seed, request.tell)
    with preserving_state(job), uncalled(job.model):
        chosen = request.given_cut or cut(whole, draft, str(choices.cuts), len(owners), sample)
    captured, notices = on_mesh(whole, draft), draft_of.notices
    if zero_of(choices):
        draft, left_whole = split_states(job, captured, draft)
        captured, notices = on_mesh(whole, draft), (*notices, *left_whole)
    ends = chosen.stages
    if captured.sharding is not None:
        ends = tuple(map(tuple, segment_ends(captured.graph, ends, captured.boxes)))
    names = [[draft.workers[worker].name for worker in own] for own in owners]
    draft = replace(draft, stages=_unmeasured(ends, names))
    result, savings = _measure(
        job, captured, draft, request.seed, request.tell, requested=choices.recompute is not None
    )
    if (limit := choices.memory_limit) is not None:
        check_memory(job, whole, result, limit)
    return Planned(result, (*notices, *chosen.reasons, *savings), notices, draft_of.warnings)


def _workers(devices: Sequence[str], threads: int | None) -> tuple[WorkerPlan, ...]:
    """The workers of a plan.

    Args:
        devices: where each computes.
        threads: of each, as given; by default those on the CPU share this host's cores, and one leads a GPU.
    """
    shared = threads_each(list(devices).count(CPU), torch.get_num_threads)
    counts = [(shared if device == CPU else 1) if threads is None else threads for device in devices]
    named = enumerate(zip(devices, counts, strict=True))
    return tuple(WorkerPlan(name=f"w{k}", device=device, threads=count) for k, (device, count) in named)


def _with_signatures(draft: Plan, captured: Captured, choices: Choices) -> Plan:
    """The draft with the given signatures, or those that `tensor_parallel` asks for."""
    own, parts = signatures_of(choices), parts_of(choices)
    if own is not None:
        return replace(draft, mesh=own.mesh, parameters=own.parameters, outputs=own.outputs)
    if parts == 1:
        return draft
    pairs = {name: ((TENSOR, signature),) for name, signature in tensor_parallel(captured, parts).items()}
    return replace(draft, mesh={TENSOR: parts}, parameters=pairs)


def _unmeasured(stages: Stages, owners: Sequence[Sequence[str]]) -> tuple[StagePlan, ...]:
    """Return stages with their ends and workers, and zeros for what is measured later."""
    nothing: dict[str, Any] = dict.fromkeys(("forward_s", "backward_s", "weights_s", "update_s"), 0.0)
    nothing |= dict.fromkeys(("parameter_bytes", "tape_bytes", "owed_bytes"), 0)
    return tuple(
        StagePlan(workers=tuple(on), segments=ends, **nothing) for ends, on in zip(stages, owners, strict=True)
    )


def _sample(job: Job, graph: Graph, draft: Plan, seed: int, tell: OnWait) -> Batch:
    """The first micro-batch of the size that will be trained on."""
    return split(first_batch(job.loader, seed, draft.deadline_s, tell), max(1, draft.batch_parts), graph.min_rows)[0]


def _measure(
    job: Job, captured: Captured, draft: Plan, seed: int, tell: OnWait, *, requested: bool
) -> tuple[Plan, tuple[str, ...]]:
    """Return the draft with edges and measurements; and what recomputing modules saves, in words."""
    stages = partition(captured.graph, [stage.segments for stage in draft.stages], draft.recompute)
    sample = _sample(job, captured.graph, draft, seed, tell)
    schedule = read(draft).schedule
    draft = replace(
        draft,
        input_bytes=message_bytes(captured.graph, (*captured.graph.inputs, *captured.graph.batch), draft.batch_parts),
        edges=tuple(_edge(captured.graph, edge, draft, schedule) for edge in stages.edges),
        exchanges=plan_exchanges(captured, stages, read(draft)),
    )
    check_plan(draft)
    devices = [torch.device(draft.device_of(stage)) for stage in range(draft.num_stages)]
    what = "measuring the stages on the first micro-batch"

    def profiles() -> list[StageProfile]:
        compile_stages(job, captured, draft, stages, seed)
        with on_threads(draft.threads), user_code(what), preserving_state(job), uncalled(job.model):
            return profile(captured, stages, sample, draft.backward, devices, halved=schedule.halved)  # type: ignore[arg-type]

    measured = profiles() if set(draft.devices) != {CPU} else in_child(profiles, what, list[StageProfile])
    with user_code("measuring the loader"):
        seen: list[Batch] = []
        rows, look = captured.graph.min_rows, seen.append
        read_s = reading_s(job.loader, seed, draft.batch_parts, draft.deadline_s, tell, look, min_rows=rows)
        with preserving_state(job), uncalled(job.model):
            for micro_batch in seen:
                captured.inputs.check_numbers(micro_batch)
    captured.settings.check()  # the loader may have changed the model
    result = replace(
        draft,
        stages=_stages(captured.graph, draft, stages, measured),
        read_s=round(read_s, DIGITS),
        exchanges=plan_exchanges(captured, stages, read(draft), [part.unused for part in measured]),
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
