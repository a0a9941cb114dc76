"""Choices that a new plan inherits from the plan of the run that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundelay.api.plan_file import read_plan
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.schedules import num_workers, schedule_named

_ALWAYS = ("rule", "compile", "precision", "clip", "transport", "deadline_s")
_WITH_THE_RULE = ("micro_batches", "predictor", "backward")


def plan_files(resume: Path) -> tuple[Path, ...]:
    """Plan files of the run that is continued: in the run folder, or in the parent folder of a checkpoint."""
    return tuple(file for file in (resume / "plan.toml", resume.parent / "plan.toml") if file.is_file())


def inherited(resume: Path, model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Choices of the run's plan that are compatible with those that are given; none if the plan is for another model.

    Micro-batches, predictor, mode and recomputed modules are inherited with the rule; cuts and devices with the number
    of workers.

    Args:
        resume: the checkpoint, or the folder of the run.
        model: fingerprint of the model.
        given: choices on the command line, by name.
    """
    plan = next((plan for plan in map(read_plan, plan_files(resume)) if plan.model == model), None)
    return {} if plan is None else _compatible(plan, given)


def _compatible(plan: Plan, given: dict[str, Any]) -> dict[str, Any]:
    size = num_workers(plan)
    kept: dict[str, Any] = {"workers": size} | {name: getattr(plan, name) for name in _ALWAYS}
    same_rule = given.get("rule", plan.rule) == plan.rule
    if same_rule:
        kept |= {name: getattr(plan, name) for name in _WITH_THE_RULE}
    if same_rule and given.get("backward", plan.backward) == plan.backward:
        kept["recompute"] = plan.recompute
    if given.get("precision", plan.precision) == plan.precision:
        kept["loss_scale"] = plan.loss_scale
    if given.get("workers", size) == size and given.get("transport", plan.transport) == plan.transport:
        kept["devices"] = ",".join(plan.devices[:size])
    if given.get("workers", size) == size and _stages_per_worker(given.get("rule", plan.rule)) == _stages_per_worker(
        plan.rule
    ):
        kept["cuts"] = [list(stage.segments) for stage in plan.stages]
    return kept


def _stages_per_worker(rule: str) -> int:
    return schedule_named(rule_named(rule).schedule).stages_per_worker
