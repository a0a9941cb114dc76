"""What a new plan takes over from that of the run which is continued, where the command line says nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundelay.api.plan_file import read_plan
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.schedules import schedule_named

ALWAYS = ("rule", "compile", "precision", "clip", "transport", "deadline_s")
WITH_THE_RULE = ("micro_batches", "predictor", "backward")


def plan_files(resume: Path) -> tuple[Path, ...]:
    """Where the plan of a run may lie: in its folder, or beside its checkpoint."""
    return tuple(file for file in (resume / "plan.toml", resume.parent / "plan.toml") if file.is_file())


def taken_over(resume: Path, model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Choices of the run's plan that go beside those that are given; none if it was for another model.

    What belongs to the rule stays with it: micro-batches, predictor, mode, modules run again. Cuts and devices stay
    where the number of stages does.

    Args:
        resume: the checkpoint, or the folder of the run.
        model: fingerprint of the model.
        given: on the command line, by name.
    """
    plan = next((plan for plan in map(read_plan, plan_files(resume)) if plan.model == model), None)
    return {} if plan is None else _fitting(plan, given)


def _fitting(plan: Plan, given: dict[str, Any]) -> dict[str, Any]:
    size = plan.num_workers
    kept: dict[str, Any] = {"workers": size} | {name: getattr(plan, name) for name in ALWAYS}
    same_rule = given.get("rule", plan.rule) == plan.rule
    if same_rule:
        kept |= {name: getattr(plan, name) for name in WITH_THE_RULE}
    if same_rule and given.get("backward", plan.backward) == plan.backward:
        kept["recompute"] = plan.recompute
    if given.get("precision", plan.precision) == plan.precision:
        kept["loss_scale"] = plan.loss_scale
    if given.get("workers", size) == size and given.get("transport", plan.transport) == plan.transport:
        kept["devices"] = ",".join(worker.device for worker in plan.workers)
    if given.get("workers", size) == size and _each(given.get("rule", plan.rule)) == _each(plan.rule):
        kept["cuts"] = [list(stage.segments) for stage in plan.stages]
    return kept


def _each(rule: str) -> int:
    return schedule_named(rule_named(rule).schedule).stages_per_worker
