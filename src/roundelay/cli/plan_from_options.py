"""The plan that follows from a command line: read from a file, kept from an earlier run, or made from its choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundelay import env
from roundelay.api import capture
from roundelay.cli.launched_choices import spread
from roundelay.cli.screen import announce, doing, stderr
from roundelay.errors import UsageError
from roundelay.frontend import Captured
from roundelay.ir.clip import Clip
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rules
from roundelay.job import Job
from roundelay.launching.forked_call import apart
from roundelay.launching.process_group import ProcessGroup
from roundelay.lower.emit import emit
from roundelay.lower.validate_plan import check_plan
from roundelay.planner.choose_micro_batches import MicroBatchChoice
from roundelay.planner.draft_plan import parse_names
from roundelay.planner.holder_choices import signatures_of
from roundelay.planner.inherited_choices import common_threads, inherited, sizes_of
from roundelay.planner.plan_options import DEADLINE_S, Choices
from roundelay.planning.check_here import check_here
from roundelay.planning.compile_stages import compile_stages, for_plan
from roundelay.planning.default_workers import cores_notice
from roundelay.planning.examined import Examined
from roundelay.planning.explain_plan import plan_notices
from roundelay.planning.make_plan import Planned, micro_batch_notice
from roundelay.planning.memory_limit import check_memory
from roundelay.planning.planning import fitted, plan_with_reasons, read_plan
from roundelay.runtime.device import resolve_devices
from roundelay.runtime.loading.prefetch import ignore_wait
from roundelay.schedules import PIPELINE
from roundelay.session.resume import load_checkpoint
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session

_LISTED = ("devices", "recompute")
"""Choices that are lists in a plan."""


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Where a plan comes from, if not from the choices alone.

    Args:
        plan_file: the plan to run.
        resume: the checkpoint, or the run folder, that is continued: its plan is kept unless a choice differs.
        restarted: the folder of the run that a launcher has restarted: its plan is kept in any case.
    """

    plan_file: Path | None = None
    resume: Path | None = None
    restarted: Path | None = None

    def kept(self) -> Plan | None:
        """The plan of the run that a launcher has restarted, if it has got so far."""
        kept = None if self.restarted is None else self.restarted / "plan.toml"
        return read_plan(kept) if kept is not None and kept.is_file() else None

    def written(self) -> Plan | None:
        """That plan, or else the one that was named."""
        return self.kept() or (None if self.plan_file is None else read_plan(self.plan_file))


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job with its captured model, its plan, the reasons for the plan's choices, and what the user is told of it."""

    job: Job
    captured: Captured
    plan: Plan
    reasons: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def session(self, seed: int, length: Length, resume: Path | None) -> Session:
        """The training by this plan, from the start or from a checkpoint."""
        lazily = self.job.weights is not None
        start = None if resume is None else load_checkpoint(resume, self.captured, lazily=lazily)
        return Session(self.job, self.captured, self.plan, seed, length, start)


def plan_job(
    job: Job, choices: Choices, seed: int, source: PlanSource, *, quiet: bool, process_group: ProcessGroup | None = None
) -> PlannedJob:
    """Capture the job, and read or make its plan. Under a launcher the leader sends its plan to the other processes.

    Raises:
        UsageError: both a plan and choices that contradict it were given.
    """
    if process_group is None and source == PlanSource():
        check_here(choices)  # again: the job may have registered the rule
    deadline_s = capture_deadline_s(choices, source, leads=process_group is None or process_group.leads)
    with doing("Capturing the model ...", quiet) as show_wait:
        captured = capture(job, seed=seed, deadline_s=deadline_s, tell=show_wait)
    if process_group is not None and not process_group.leads:
        return PlannedJob(job, captured, Plan.parse(process_group.fetch("plan")))
    model = captured.graph.fingerprint
    resumed = None if source.resume is None or source.plan_file is not None else resumed_plan(source.resume, model)
    if process_group is not None:
        written = source.written()
        if written is None or written.layout == PIPELINE:
            choices = spread(choices, process_group.size, written or resumed)
    existing = _existing_plan(model, replace(choices, memory_limit=None), source, resumed)
    if existing is None:
        planned = _make_plan(job, captured, choices, seed, resumed, quiet=quiet)
    else:
        planned = _told(job, captured, existing, seed, source)
        if choices.memory_limit is not None:
            fitted(for_plan(captured, existing), existing)
            check_memory(Examined(job, captured, seed, ignore_wait), existing, choices.memory_limit)
        if existing.compile and process_group is None:
            _compile_apart(job, captured, existing, seed, quiet=quiet)
    show_plan(planned.plan)
    notices = (*planned.notices, *plan_notices(planned.plan))
    for line in notices:
        announce(f"{line}.", quiet and process_group is None and line not in planned.warnings)
    if process_group is not None and planned.plan.num_workers != process_group.size:
        raise UsageError(
            "the processes that the launcher has started",
            got=str(process_group.size),
            expected=f"{planned.plan.num_workers}, one for each worker of the plan"
            + ("" if planned.plan.layout == PIPELINE else f" with layout {planned.plan.layout}"),
            remedy="Start as many"
            + (", or give --workers." if planned.plan.layout == PIPELINE else ", or another layout."),
        )
    if process_group is not None:
        process_group.publish("plan", planned.plan.text())
    return PlannedJob(job, captured, planned.plan, planned.reasons, notices)


def _make_plan(
    job: Job, captured: Captured, choices: Choices, seed: int, resumed: Plan | None, *, quiet: bool
) -> Planned:
    wanted = choices if resumed is None else choices.over(inherited(resumed, choices))
    steps = "Planning, compiling and measuring" if wanted.compile else "Planning and measuring"
    with doing(f"{steps} the stages ...", quiet) as show_wait:
        planned = plan_with_reasons(job, wanted, captured=captured, seed=seed, tell=show_wait)
    of_threads = cores_notice(planned.plan, _workers_here(planned.plan)) if choices.threads is not None else ""
    return replace(planned, notices=(*planned.notices, of_threads)) if of_threads else planned


def _told(job: Job, captured: Captured, plan: Plan, seed: int, source: PlanSource) -> Planned:
    """A plan that was made elsewhere, or is continued, with what a person should know of it."""
    read = source.plan_file is not None
    parts = micro_batch_notice(job, captured, plan, seed) if read else MicroBatchChoice(plan.micro_batches)
    notices = tuple(notice for notice in (parts.notice, cores_notice(plan, _workers_here(plan))) if notice)
    return Planned(plan, notices=notices, warnings=(parts.notice,) if parts.otherwise else ())


def _workers_here(plan: Plan) -> Sequence[int]:
    """Numbers of the workers that are known to run on this host: under a launcher none."""
    return () if env.is_launched() else range(plan.num_workers)


def _compile_apart(job: Job, captured: Captured, plan: Plan, seed: int, *, quiet: bool) -> None:
    """Compile the stages in a process of their own, so that the run finds them in torch's cache."""
    with doing("Compiling the stages ...", quiet):
        lowered = for_plan(captured, plan)
        stages = fitted(lowered, plan)
        apart(lambda: compile_stages(job, lowered, plan, stages, seed), "compiling the stages")


def show_plan(plan: Plan) -> None:
    """What ROUNDELAY_DEBUG shows of a plan: its text from level 1 on, its programs from level 3 on."""
    if env.level() >= 1:
        stderr.print(plan.text(["The plan (ROUNDELAY_DEBUG=1):"]), markup=False, soft_wrap=True)
    if env.level() >= 3:
        for program in emit(check_plan(plan)):
            stderr.print(str(program), markup=False, soft_wrap=True)


def _existing_plan(model: str, choices: Choices, source: PlanSource, resumed: Plan | None) -> Plan | None:
    """The plan that is read from a file, if one is, with the deadline of the choices.

    Args:
        model: fingerprint of the model.
        choices: of the command line; no computed value depends on their deadline.
        source: where the plan may be.
        resumed: the plan of the run that is continued, if any.

    Raises:
        UsageError: a choice contradicts the plan.
    """
    others = replace(choices, deadline_s=None)
    restarted = source.kept()
    plan: Plan | None
    if restarted is not None and restarted.model == model:
        plan = _checked(restarted, replace(others, cuts=None))  # the plan was made with these cuts
    elif source.plan_file is not None:
        plan = _checked(read_plan(source.plan_file), choices)
    else:
        agrees = resumed is not None and choices.cuts is None and not list(_contradicted(resumed, others))
        plan = resumed if agrees else None
    if plan is None or choices.deadline_s is None or source.plan_file is not None:
        return plan
    return replace(plan, deadline_s=choices.deadline_s)


def plan_of(resume: Path, model: str) -> Plan | None:
    """The plan of the run that is continued, if it is for this model."""
    return next((plan for plan in map(read_plan, plan_files(resume)) if plan.model == model), None)


def resumed_plan(resume: Path, model: str) -> Plan | None:
    """The plan of the run that is continued; says so if it was another model's, whose choices are not kept."""
    found, files = plan_of(resume, model), plan_files(resume)
    if found is None and files:
        rule = read_plan(files[0]).rule
        announce(f"The plan in {files[0].parent} is of another model: its choices are not kept (rule {rule}).", False)
    return found


def capture_deadline_s(choices: Choices, source: PlanSource, *, leads: bool) -> float:
    """Seconds that capture waits for the loader: the option's, or those of the plan that will be run.

    Under a launcher only the leader needs the plan file: its absence elsewhere is no error.
    """
    if choices.deadline_s is not None:
        return choices.deadline_s
    if source.plan_file is not None:
        files = [source.plan_file] if leads or source.plan_file.is_file() else []
    else:
        files = [] if source.resume is None else plan_files(source.resume)
    return read_plan(files[0]).deadline_s if files else DEADLINE_S


def plan_files(resume: Path) -> list[Path]:
    """Plan files of the run that is continued: in the run folder, or in the parent folder of a checkpoint."""
    return [file for file in (resume / "plan.toml", resume.parent / "plan.toml") if file.is_file()]


def _checked(plan: Plan, choices: Choices) -> Plan:
    """The plan; refuses choices that contradict it."""
    if choices.cuts is not None:
        raise UsageError(
            "--cuts with --plan",
            got=str(choices.cuts),
            expected="one of them: a plan has its own cuts",
            remedy="Leave --cuts out, or edit the plan's segments.",
        )
    for name, value, planned_value in _contradicted(plan, choices):
        raise UsageError(
            f"--{name.replace('_', '-')} with --plan",
            got=str(value),
            expected=f"{','.join(planned_value) or 'none' if name in _LISTED else planned_value}, as in the plan",
            remedy="Leave the option out, or edit the plan.",
        )
    return plan


def _contradicted(plan: Plan, choices: Choices) -> Iterator[tuple[str, Any, Any]]:
    """(name, value of the option, value in the plan) where these differ, except for cuts."""
    for name, value in choices.given().items():
        wanted, planned_value = value, getattr(plan, name, None)
        match name:
            case "cuts":
                continue
            case "workers" | "data_parallel" | "tensor_parallel" | "zero" | "hybrid" | "stages" | "micro_batches":
                alike = {"workers": plan.num_workers, "data_parallel": plan.replicas, "stages": plan.num_stages}
                alike |= {"micro_batches": plan.micro_batches, "tensor_parallel": 1, "zero": plan.zero}
                planned_value = (alike | sizes_of(plan)).get(name, "none")
            case "devices":
                wanted = resolve_devices(value, plan.num_workers, plan.transport)
                planned_value = tuple(worker.device for worker in plan.workers)
            case "threads":
                planned_value = common_threads(plan) or "several numbers"
            case "clip":
                wanted = Clip.parse(value)
            case "loss_scale":
                wanted = LossScale.parse(value)
            case "recompute":
                wanted = parse_names(value)
            case "cluster":
                planned_value = "workers of its own"
            case "signatures":
                wanted, planned_value = signatures_of(Choices(signatures=value)), GivenSignatures.of(plan)
        if wanted != planned_value:
            yield name, value, planned_value


def check_source(choices: Choices, source: PlanSource) -> None:
    """Check what can be said of choices, or of the plan that is read, before the job is loaded.

    Args:
        choices: of the command line.
        source: where the plan may be.

    Raises:
        UsageError: the plan cannot be read or executed, a choice contradicts it, or choices cannot be used here.
    """
    known = {rule.name for rule in rules()}
    files = [] if source.resume is None or source.plan_file is not None else plan_files(source.resume)
    if source.plan_file is not None:
        plan = _checked(read_plan(source.plan_file), replace(choices, memory_limit=None))
        if plan.rule in known:
            check_plan(plan)
    elif source.resume is None and choices.rule in {None, *known}:
        check_here(choices)
    elif files and {(plan := read_plan(files[0])).rule, choices.rule or plan.rule} <= known:
        _check_changes(plan, choices)


def _check_changes(plan: Plan, choices: Choices) -> None:
    """Check choices that change the plan of the run that is continued."""
    if list(_contradicted(plan, replace(choices, deadline_s=None, memory_limit=None))):
        check_here(choices.over(inherited(plan, choices)))
