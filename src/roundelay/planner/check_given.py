"""Judges choices before the model is known: names, numbers, and what can be combined. No torch is needed.

A draft of the plan is made of the choices, and validated as plans are; what only the model decides is left open.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from roundelay.errors import PlanError, UsageError, did_you_mean
from roundelay.ir.clip import Clip
from roundelay.ir.device_names import CPU, check_number, listed_devices
from roundelay.ir.num_bytes import parse_bytes
from roundelay.ir.plan import Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import rule_named
from roundelay.ir.sbp import Split
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_deadline, check_devices, check_num_threads, check_settings
from roundelay.planner.draft_plan import TENSOR, default_rule, draft_plan, parse_names
from roundelay.planner.given_layout import in_layout, in_pipeline, owners_of
from roundelay.planner.holder_choices import cluster_of, parts_of, replicas_of, signatures_of, zero_of
from roundelay.planner.plan_options import Choices
from roundelay.schedules import LAYOUTS, PIPELINE, Schedule, schedule_for

FULL, QUICK, OFF = CHECKS = ("full", "quick", "off")
"""Checks before a training: see :mod:`roundelay.proof.fidelity_precheck`."""

_ANY_RULE = ("transport", "precision", "loss_scale", "ema", "micro_batches", "devices", "deadline_s")
"""Choices that can be judged without the rule."""

_ALONE = (
    "workers",
    "layout",
    "data_parallel",
    "hybrid",
    "tensor_parallel",
    "micro_batches",
    "threads",
    "precision",
    "clip",
    "cluster",
    "ema",
    "transport",
    "deadline_s",
    "memory_limit",
)
"""Choices that can be judged without any other."""

_UNKNOWN = dict.fromkeys(
    ("forward_s", "backward_s", "weights_s", "update_s", "parameter_bytes", "tape_bytes", "owed_bytes"), 0
)


def check_given(choices: Choices, *, rule_known: bool = True) -> None:
    """Check everything about choices that does not depend on the model.

    Args:
        choices: as for :func:`roundelay.plan`.
        rule_known: False where the rule is still to be registered; then only what suits any rule is checked.

    Raises:
        PlanError: a name is unknown, a number impossible, or two choices cannot be combined.
    """
    choices.check_kinds()
    if choices.deadline_s is not None:
        check_deadline(choices.deadline_s)
    check_num_workers(choices.workers)
    check_num_threads("--threads", 1 if choices.threads is None else choices.threads)
    if choices.memory_limit is not None:
        parse_bytes(choices.memory_limit, "--memory-limit")
    if choices.clip is not None:
        Clip.parse(choices.clip)
    laid = in_layout(choices)
    replicas_of(laid), parts_of(laid), zero_of(laid), cluster_of(laid)
    if not rule_known:
        laid, choices = (_only(_ANY_RULE, one) for one in (laid, choices))
    _check_draft(choices, laid)


def _only(names: Collection[str], choices: Choices) -> Choices:
    """Some of the choices."""
    return Choices(**{name: value for name, value in choices.given().items() if name in names})


def check_each(choices: Choices) -> None:
    """Check each choice by itself, where a plan that is not read yet says what the others are.

    Raises:
        PlanError: a name is unknown, or a number impossible.
    """
    choices.check_kinds()
    for name in _ALONE:
        check_given(_only([name], choices), rule_known=False)


def check_num_workers(workers: int | None) -> None:
    """Refuse a number of workers below one; None is accepted.

    Raises:
        PlanError: it is zero or negative.
    """
    if workers is not None and workers < 1:
        raise PlanError("workers", got=str(workers), expected="at least 1", remedy="Give --workers 1 or more.")


def check_length(steps: int | None, epochs: int | None) -> None:
    """Refuse a number of updates or epochs below one; None is accepted.

    Raises:
        UsageError: one of them is zero or negative.
    """
    for name, value in (("steps", steps), ("epochs", epochs)):
        if value is not None and value < 1:
            raise UsageError(f"--{name}", got=str(value), expected="at least 1", remedy=f"Give a positive --{name}.")


def validate_check(option: str | None) -> None:
    """Refuse an unknown check.

    Raises:
        UsageError: the check is unknown.
    """
    if option is not None and option not in CHECKS:
        raise UsageError(
            "--check",
            got=repr(option),
            expected=f"one of {', '.join(CHECKS)}",
            remedy=did_you_mean(option, CHECKS) + "Choose one of these.",
        )


def _check_draft(choices: Choices, laid: Choices) -> None:
    """Validate the draft of a plan.

    Args:
        choices: as given.
        laid: the same in their layout.
    """
    layout = PIPELINE if laid.layout is None else laid.layout
    rule = rule_named(default_rule(layout) if choices.rule is None else choices.rule)
    num_stages = _num_stages(choices)
    draft = draft_plan("", rule.name, 1 if choices.workers is None else choices.workers, laid)
    draft = replace(
        _with_holders(draft, laid),
        recompute=parse_names(choices.recompute or ()),
        stages=(StagePlan(workers=(), segments=(), **_UNKNOWN),) * num_stages,
    )
    reading = read(draft)
    check_settings(reading)
    if (devices := choices.devices) is not None:
        names = listed_devices(devices)
        schedule = schedule_for(rule, layout, num_stages=num_stages)
        if names and (size := _num_workers(draft, schedule)):
            check_number(names, size, devices)
        names = names or (CPU if devices == CPU else f"{devices}:0",)
        workers = tuple(WorkerPlan(name=f"w{k}", device=one, threads=1) for k, one in enumerate(names))
        check_devices(replace(draft, workers=workers), reading.transport)


def _num_stages(choices: Choices) -> int:
    """How many stages the plan is asked to have; 0 if the model has a say in it."""
    if not in_pipeline(choices):
        return choices.stages or 0
    each = schedule_for(rule_named(default_rule(PIPELINE) if choices.rule is None else choices.rule)).stages_per_worker
    return (choices.workers or 0) * max(1, each)


def _with_holders(draft: Plan, laid: Choices) -> Plan:
    """The draft with its mesh, and with some split state where optimizer states are split."""
    own, parts = signatures_of(laid), parts_of(laid)
    if own is not None:
        draft = replace(draft, mesh=own.mesh, parameters=own.parameters, outputs=own.outputs)
    elif parts > 1:
        draft = replace(draft, mesh={TENSOR: parts})
    return replace(draft, states={"": ((draft.state_axis, Split(0)),)}) if zero_of(laid) else draft


def _num_workers(draft: Plan, schedule: Schedule) -> int:
    """How many workers the plan will have; 0 if that depends on an unknown number of stages."""
    form = LAYOUTS.get(draft.layout)
    num_stages = draft.num_stages or int(form is not None and not form.takes_turns)
    sizes = draft.replicas, draft.mesh_size, draft.micro_batches
    return owners_of(schedule, draft.layout, num_stages, sizes)[1] if num_stages else 0
