"""Make a plan: choose what is not given, measure the stages, and prove the result."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from roundelay.errors import counted
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan, StagePlan
from roundelay.ir.rule import rule_named
from roundelay.ir.stage import Partition
from roundelay.job import Job
from roundelay.lower.validate_plan import check_plan
from roundelay.planner.candidate import Asked, Candidate, Draft, candidate, drafted
from roundelay.planner.choose_micro_batches import MicroBatchChoice, choose_micro_batches
from roundelay.planner.costs import DIGITS, over_links
from roundelay.planner.free_order import with_capacities
from roundelay.planner.plan_exchanges import plan_exchanges
from roundelay.planner.prove_plan import prove
from roundelay.planning.compile_stages import compile_stages
from roundelay.planning.default_workers import choose_faster
from roundelay.planning.examined import Examined
from roundelay.planning.memory_limit import check_memory, first_allowed, within_limit
from roundelay.planning.on_mesh import on_mesh
from roundelay.planning.recompute_savings import describe_savings
from roundelay.planning.stage_profiler import StageProfile, profile
from roundelay.planning.torch_scope import in_child, on_threads, user_code
from roundelay.runtime.device import check_devices_exist
from roundelay.runtime.loading.loader_probe import reading_s
from roundelay.runtime.loading.prefetch import ignore_wait

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
    """What is asked of a plan, and of which job.

    Args:
        source: the job.
        asked: the choices.
    """

    source: Examined
    asked: Asked

    def drafted(self, workers: int | None) -> Draft:
        """Everything but the cuts."""
        return drafted(self.source, self.asked, workers)


def plan_one_or_two_workers(request: PlanRequest) -> Planned:
    """One worker with all threads, or two with half of them, whichever is predicted to take less time."""
    two = request.drafted(None)
    if two.plan.micro_batches == 1:  # two workers would take turns
        one = request.drafted(1)
        why = f"1 worker of {counted(one.plan.threads, 'thread')}: {_IN_TURNS}"
        reason = [why] if two.plan.num_workers > 1 else []
        return measured_plan(request, replace(one, notices=(*two.notices, *one.notices, *reason)))
    several = measured_plan(request, two)
    one_planned = measured_plan(request, request.drafted(1))
    taken, why = choose_faster(one_planned.plan, several.plan)
    planned = one_planned if taken is one_planned.plan else several
    return replace(planned, reasons=(why, *planned.reasons), notices=(why, *planned.notices))


def micro_batch_notice(job: Job, captured: Captured, plan: Plan, seed: int) -> MicroBatchChoice:
    """What it changes that a plan cuts batches into micro-batches.

    Raises:
        PlanError: the plan has replicas, and the first batch cannot be dealt out to them.
    """
    source = Examined(job, captured, seed, ignore_wait)
    with on_threads(plan.leader_threads):
        return choose_micro_batches(
            rule_named(plan.rule),
            plan.micro_batches,
            lambda parts: source.divisibility(plan, parts),
            requested=True,
            replicas=plan.replicas,
        )


def measured_plan(request: PlanRequest, draft: Draft) -> Planned:
    """Choose the cuts, and measure the stages: the fastest, or those that a limit of memory allows.

    Raises:
        PlanError: none is allowed, or found.
    """
    check_devices_exist(draft.plan.devices)
    asked = request.asked

    def made() -> Iterator[tuple[Hashable, Callable[[], Planned]]]:
        for choices in within_limit(asked.choices):
            found = candidate(request.source, replace(asked, choices=choices), draft)
            yield tuple([stage.segments for stage in found.plan.stages]), partial(_measured, request, found)

    return first_allowed(made())


def _measured(request: PlanRequest, made: Candidate) -> Planned:
    """Measure the stages, and check what workers will hold."""
    result, savings = _measure(request.source, made, requested=request.asked.choices.recompute is not None)
    cluster, limit = request.asked.machine.cluster, request.asked.choices.memory_limit
    result = with_capacities(over_links(result, cluster))
    prove(result)
    if limit is not None or cluster is not None:
        check_memory(request.source, result, limit, cluster)
    return Planned(result, (*made.notices, *made.reasons, *savings), made.notices, made.warnings)


def _measure(source: Examined, made: Candidate, *, requested: bool) -> tuple[Plan, tuple[str, ...]]:
    """Return the candidate's plan with measurements; and what recomputing modules saves, in words."""
    job, draft, stages = source.job, made.plan, made.stages
    captured, reading = on_mesh(source.lowered(draft).captured, draft), check_plan(draft)
    sample, schedule = source.sample(draft), reading.schedule
    devices = [torch.device(draft.device_of(stage)) for stage in range(draft.num_stages)]
    what = "measuring the stages on the first micro-batch"

    def profiles() -> list[StageProfile]:
        compile_stages(job, captured, draft, stages, source.seed)
        with on_threads(draft.threads), user_code(what), source.untouched():
            return profile(captured, stages, sample, draft.backward, devices, halved=schedule.halved)  # type: ignore[arg-type]

    measured = profiles() if set(draft.devices) != {CPU} else in_child(profiles, what, list[StageProfile])
    read_s = _reading_s(source, captured, draft)
    captured.effects.settings.check()  # the loader may have changed the model
    result = replace(
        draft,
        stages=_stages(captured.graph, draft, stages, measured),
        read_s=round(read_s, DIGITS),
        exchanges=plan_exchanges(made.laid, stages, reading, [part.unused for part in measured]),
    )
    return result, describe_savings(captured.graph, draft, stages, measured, requested=requested)


def _reading_s(source: Examined, captured: Captured, draft: Plan) -> float:
    """Seconds in which the loader gives a micro-batch; the numbers of those that it gives are looked at."""
    with user_code("measuring the loader"):
        seen: list[Batch] = []
        rows, look = captured.graph.min_rows, seen.append
        job, parts = source.job, draft.batch_parts
        read_s = reading_s(job.loader, source.seed, parts, draft.deadline_s, source.tell, look, min_rows=rows)
        with source.untouched():
            for micro_batch in seen:
                captured.inputs.check_numbers(micro_batch)
    return read_s


def _stages(graph: Graph, draft: Plan, stages: Partition, measured: Sequence[StageProfile]) -> tuple[StagePlan, ...]:
    often = (draft.micro_batches - 1) / draft.micro_batches  # the first has no sums to add its gradients to
    return tuple(
        replace(
            stage,
            forward_s=round(part.forward_s, DIGITS),
            backward_s=round(part.backward_s + (0.0 if part.weights_s else often * part.add_s), DIGITS),
            weights_s=round(part.weights_s + (often * part.add_s if part.weights_s else 0.0), DIGITS),
            update_s=round(part.update_s, DIGITS),
            parameter_bytes=sum(graph.parameters[n].num_bytes for n in spec.parameters),
            tape_bytes=part.tape_bytes,
            owed_bytes=part.owed_bytes,
        )
        for stage, spec, part in zip(draft.stages, stages.stages, measured, strict=True)
    )
