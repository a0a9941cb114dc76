"""The choices that a plan was made by, as far as it tells; and which of them a run that continues takes over."""

from __future__ import annotations

from typing import Any

from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planner.plan_options import Choices
from roundelay.schedules import PIPELINE, schedule_named

_ALWAYS = ("rule", "compile", "precision", "ema", "deterministic", "transport", "deadline_s")
_WITH_THE_RULE = ("micro_batches", "predictor", "backward")


def inherited(plan: Plan, choices: Choices) -> Choices:
    """Choices of the plan of the run that is continued, as far as they are compatible with those that are given.

    Micro-batches, predictor, mode and recomputed modules are inherited with the rule; cuts and devices with the number
    of workers.
    """
    given = choices.given()
    sizes = _sizes_beside(plan, given) if given.get("layout", plan.layout) == plan.layout else {}
    alike = _micro_batches_alike(plan, given)
    sizes.pop("tensor_parallel", 0)  # what found the plan's signatures; they are inherited themselves
    divided = {"zero": 0} if given.get("data_parallel", 0) == 1 else {}
    if "zero" in sizes:
        divided = {"zero": sizes.pop("zero")} | divided
    kept: dict[str, Any] = sizes | alike | divided | {name: getattr(plan, name) for name in _ALWAYS}
    kept["clip"] = str(plan.clip)
    if plan.mesh_size > 1 and not given.keys() & {"signatures", "tensor_parallel"}:
        kept["signatures"] = GivenSignatures.of(plan)
    rule = given.get("rule", plan.rule)
    held = choices.over(Choices(**kept))
    same_size = bool(sizes) and (parts_of(held), replicas_of(held)) == (plan.mesh_size, plan.replicas)
    same_size = same_size and all(given.get(name, size) == size for name, size in sizes.items())
    if rule == plan.rule and sizes:
        kept |= {name: getattr(plan, name) for name in _WITH_THE_RULE} | sizes
    if rule == plan.rule and given.get("backward", plan.backward) == plan.backward:
        kept["recompute"] = plan.recompute
    if given.get("precision", plan.precision) == plan.precision:
        kept["loss_scale"] = str(plan.loss_scale)
    if same_size and given.get("transport", plan.transport) == plan.transport:
        kept["devices"] = ",".join(plan.devices)
    if same_size and (threads := common_threads(plan)) is not None:
        kept["threads"] = threads
    boxed = {exchange.value for exchange in plan.exchanges}  # these are no operations of the model
    cuts = [[name for name in stage.segments if name not in boxed] for stage in plan.stages]
    at_boxings = any(stage.segments[-1] in boxed for stage in plan.stages)
    if same_size and _stages_per_worker(rule) == _stages_per_worker(plan.rule) and not at_boxings:
        kept["cuts"] = cuts
    return Choices(**kept)


def sizes_of(plan: Plan) -> dict[str, Any]:
    """The choices that make the holders of stages, and what each has, by name."""
    if plan.layout != PIPELINE:
        return {"layout": plan.layout, "stages": plan.num_stages, "micro_batches": plan.batch_parts}
    whole = {"data_parallel": plan.replicas, "zero": plan.zero}
    held = {"hybrid": f"{plan.replicas // plan.shards}x{plan.shards}"} if plan.shards else whole
    return {"workers": plan.num_workers // plan.grid.size, "tensor_parallel": plan.mesh_size, **held}


def _sizes_beside(plan: Plan, given: dict[str, Any]) -> dict[str, Any]:
    """The same, without those in whose place others are given: ``hybrid``, or what it replaces."""
    sizes, whole = sizes_of(plan), {"data_parallel": plan.replicas, "zero": plan.zero}
    if plan.layout == PIPELINE and given.keys() & whole.keys():
        return {name: size for name, size in (whole | sizes).items() if name != "hybrid"}
    return {name: size for name, size in sizes.items() if "hybrid" not in given or name not in whole}


def common_threads(plan: Plan) -> int | None:
    """The intra-op threads of each worker; None where they differ."""
    counts = {worker.threads for worker in plan.workers}
    return counts.pop() if len(counts) == 1 else None


def _micro_batches_alike(plan: Plan, given: dict[str, Any]) -> dict[str, Any]:
    """The numbers of stages and micro-batches where another layout is given than the plan's."""
    layout, size = given.get("layout", plan.layout), {"micro_batches": plan.batch_parts}
    if layout == plan.layout or plan.batch_parts == 1 or given.keys() & {"micro_batches", "data_parallel"}:
        return {}
    return size if layout == PIPELINE else size | {"stages": plan.num_stages}


def _stages_per_worker(rule: str) -> int:
    return schedule_named(rule_named(rule).schedule).stages_per_worker
