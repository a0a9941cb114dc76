"""Capture a job, and plan it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from roundelay import simulator
from roundelay.errors import PlanError, PlanWarning, UsageError
from roundelay.frontend import Captured
from roundelay.frontend import capture as capture_model
from roundelay.frontend.batch import Batch
from roundelay.frontend.model_call import train as train_mode
from roundelay.guards.examine import examine
from roundelay.guards.watch import preserving_state, refusing_calls
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan, StagePlan
from roundelay.ir.stage import Partition
from roundelay.job import Job
from roundelay.lower.emit import emit
from roundelay.lower.partition import partition
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_deadline, check_fit, check_plan
from roundelay.planner.candidate import asked_of
from roundelay.planner.holder_choices import cluster_of
from roundelay.planner.plan_exchanges import check_exchanges, plan_exchanges
from roundelay.planner.plan_options import DEADLINE_S, Choices, Keywords, from_keywords, shows_choices
from roundelay.planner.prove_plan import prove, prove_checked
from roundelay.planning.check_here import check_here, refuse_launched
from roundelay.planning.default_workers import workers_are_open
from roundelay.planning.examined import Examined, hardware_here
from roundelay.planning.job_file import GivenJob, given_job
from roundelay.planning.make_plan import Planned, PlanRequest, measured_plan, plan_one_or_two_workers
from roundelay.planning.num_micro_batches import check_counts
from roundelay.planning.on_mesh import laid_of, on_mesh
from roundelay.planning.torch_scope import on_all_threads, without_dumps
from roundelay.planning.validate_job import check_inputs, check_job
from roundelay.planning.weights_file import check_filled, fill
from roundelay.runtime.loading.loader_probe import first_batch
from roundelay.runtime.loading.prefetch import OnWait, ignore_wait


def capture(job: GivenJob, *, seed: int = 0, deadline_s: float = DEADLINE_S, tell: OnWait = ignore_wait) -> Captured:
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
    job = given_job(job, seed)
    check_job(job)
    check_deadline(deadline_s)
    if job.weights is not None:
        fill(job.model, Path(job.weights))
    check_filled(job.model)
    with on_all_threads():
        with refusing_calls(job.model):
            sample = first_batch(job.loader, seed, deadline_s, tell)
        train_mode(job.model)
        with preserving_state(job):
            return _captured(job, sample)


def _captured(job: Job, sample: Batch) -> Captured:
    with preserving_state(job):
        check_inputs(job, sample)
    with without_dumps():
        captured = capture_model(job.model, job.loss, sample, job.inputs)
    captured = examine(job, captured, sample)
    check_counts(captured, sample)
    return captured


@shows_choices
def plan(job: GivenJob, *, seed: int = 0, captured: Captured | None = None, **choices: Unpack[Keywords]) -> Plan:
    """Plan a job: choose everything that is not given, measure the stages, and prove the resulting plan.

    Args:
        job: the job.
        seed: of the sample batch.
        captured: the job's model if it has been captured already.
        choices: what to choose, as :class:`roundelay.planner.plan_options.Choices` says: ``workers``, ``rule``,
            ``cuts``, ``micro_batches`` and others, which are options of the command line too. None means not given.

    Raises:
        CaptureError: the model cannot be captured, or cannot be cut into so many stages.
        PlanError: the choices cannot be combined.
        DeadlineError: a batch did not come within ``deadline_s``.
        TypeError: a choice is unknown.
    """
    own = from_keywords(plan, choices)
    check_here(own)
    planned = plan_with_reasons(given_job(job, seed), own, seed=seed, captured=captured)
    return with_warnings(planned, stacklevel=3).plan


def captured_and_planned(
    function: Callable[..., Any], job: GivenJob, plan: Plan | None, seed: int, keywords: Mapping[str, Any]
) -> tuple[Job, Captured, Planned]:
    """Return the job, captured, and the plan passed to a function, or one made from the choices passed to it.

    Args:
        function: the function, to name it in errors.
        job: the job, as it is given; it is made after the choices are checked.
        plan: the plan, or None.
        seed: of the data.
        keywords: as for :func:`plan`; None means not given.

    Raises:
        TypeError: a choice is unknown.
        UsageError: both a plan and a choice were given.
    """
    choices = from_keywords(function, keywords)
    if plan is None:
        check_here(choices)
    refuse_launched(plan.transport if plan is not None else choices.transport or "memory")
    if plan is None:
        made = given_job(job, seed)
        captured = capture(made, seed=seed, deadline_s=choices.deadline_s or DEADLINE_S)
        planned = plan_with_reasons(made, choices, seed=seed, captured=captured)
        return made, captured, with_warnings(planned, stacklevel=4)
    if given := choices.given():
        names, call = ", ".join(given), ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise UsageError(
            f"plan together with {names} in roundelay.{function.__name__}",
            got=f"a plan, and {call}",
            expected="one of them: a plan contains all choices",
            remedy=f"Leave {names} out, or leave the plan out, or make the plan by roundelay.plan(job, {call}).",
        )
    made = given_job(job, seed)
    return made, capture(made, seed=seed, deadline_s=plan.deadline_s), Planned(plan)


def with_warnings(planned: Planned, stacklevel: int) -> Planned:
    """The same; a :class:`PlanWarning` tells the caller where it trains something else than whole batches.

    Args:
        planned: the plan and what to say of it.
        stacklevel: of the caller; as in :func:`warnings.warn`.
    """
    for text in planned.warnings:
        warnings.warn(text.removeprefix("warning: "), PlanWarning, stacklevel=stacklevel)
    return planned


def plan_with_reasons(
    job: Job, choices: Choices, *, seed: int = 0, captured: Captured | None = None, tell: OnWait = ignore_wait
) -> Planned:
    """As :func:`plan`, with the reasons for its choices.

    Args:
        job: the job.
        choices: what is given.
        seed: of the sample batch.
        captured: the job's model if it has been captured already.
        tell: called when waiting for the loader takes long.
    """
    check_here(choices)
    choices = choices.over(Choices(ema=job.ema, deadline_s=DEADLINE_S))
    deadline_s = choices.deadline_s or DEADLINE_S
    captured = captured or capture(job, seed=seed, deadline_s=deadline_s, tell=tell)
    asked = asked_of(captured.graph, choices, replace(hardware_here(), cluster=cluster_of(choices)))
    request = PlanRequest(Examined(job, captured, seed, tell), asked)
    if asked.cut is None and workers_are_open(asked.given):
        return plan_one_or_two_workers(request)
    return measured_plan(request, request.drafted(choices.workers))


def fitted(captured: Captured, plan: Plan) -> Partition:
    """Check a plan against the captured model, prove it, and return its stages.

    Raises:
        PlanError: it does not fit the model, or cannot be executed.
    """
    reading = check_plan(plan)
    ours = plan.model == captured.graph.fingerprint  # cuts of another model mean nothing in this one
    ends = [stage.segments for stage in plan.stages]
    stages = partition(captured.graph, ends, plan.recompute) if ours else Partition(())
    check_fit(plan, captured.graph.fingerprint, stages)
    check_exchanges(laid_of(captured), stages, reading)
    prove_checked(reading)
    return stages


def without_mesh(captured: Captured, plan: Plan) -> Plan:
    """The plan with each stage of a replica on one worker, cut at the same places.

    Args:
        captured: the model, on no mesh.
        plan: any.
    """
    own, size = captured.graph, plan.mesh_size
    known = {own.ops[i].name for i in own.cuts} | {own.ops[-1].name}
    before: dict[str, str] = {}  # the last place to cut the model up to each operation
    for op in on_mesh(captured, plan).graph.ops:
        before[op.name] = op.name if op.name in known else next(reversed(before.values()), "")
    stages: list[StagePlan] = []
    for stage in plan.stages:  # a boxing at its beginning is none of its segments
        past = ("", *(stages[-1].segments[-1:] if stages else ()))
        ends = tuple([end for end in dict.fromkeys(before.get(n, n) for n in stage.segments) if end not in past])
        stages.append(replace(stage, segments=ends, workers=stage.workers[::size]))
    named = {name for stage in stages for name in stage.workers}
    workers = tuple(worker for worker in plan.workers if worker.name in named)
    result = replace(plan, mesh={}, parameters={}, outputs={}, states={}, stages=tuple(stages), workers=workers)
    cut_up = partition(captured.graph, [stage.segments for stage in stages], plan.recompute)
    unused = [next((e.unused for e in plan.exchanges if e.stage == k), ()) for k in range(plan.num_stages)]
    return replace(result, exchanges=plan_exchanges(laid_of(captured), cut_up, read(result), unused))


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
    return simulator.simulate(plan, emit(check_plan(plan)), stream([plan.micro_batches] * batches))
