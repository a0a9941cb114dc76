"""Validates what a plan says of its workers, as holders of stages: replicas, the mesh, and what they exchange."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.errors import PlanError
from roundelay.ir.exchange import GRADIENT_PARTS, USED, WEIGHT_GRADIENT, all_gather, all_reduce, reduce_scatter
from roundelay.ir.mesh import COPIES, REPLICAS, SHARDS
from roundelay.ir.program import EXCHANGES
from roundelay.ir.residence import SHARDED
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.lower.reading import Reading


def check_workers(reading: Reading) -> None:
    """Check the workers' names, and that each worker has exactly the stages that the schedule lets it alternate."""
    plan = reading.plan
    names = [worker.name for worker in plan.workers]
    if len(set(names)) != len(names):
        raise PlanError(
            "workers of the plan",
            got="the name " + next(name for name in names if names.count(name) > 1) + " twice",
            expected="a different name for each",
            remedy="Correct the plan.",
        )
    schedule = reading.schedule
    _check_holders(reading)
    placed = plan.worker_stages
    _check_exchange_kinds(reading)
    each = schedule.stages_per_worker or plan.num_stages
    if plan.num_stages % each or set(placed) != schedule.groups(plan.num_stages):
        groups = sorted(schedule.groups(plan.num_stages - plan.num_stages % each))
        raise PlanError(
            "workers of the plan's stages",
            got="; ".join(f"{name}: {_numbers(stages)}" for name, stages in zip(names, placed, strict=True)),
            expected=f"{each} for each worker, as {schedule.name} makes them take turns: "
            + "; ".join(_numbers(group) for group in groups),
            remedy="Correct `workers` of the plan's stages, or write a new plan with `roundelay plan`.",
        )


def _numbers(stages: Sequence[int]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + (" and ".join(map(str, stages)) or "none")


def _check_holders(reading: Reading) -> None:
    """Check that each stage has its holders, of like devices, and that a worker is one holder of all its stages."""
    plan = reading.plan
    for stage, planned in enumerate(plan.stages):
        if len(planned.workers) != (count := reading.num_holders(stage)):
            raise plan.wrong_holders(stage, count)
    for worker, stages in enumerate(plan.worker_stages):
        places = {(stage, r) for stage in stages for r, holder in enumerate(plan.holders(stage)) if holder == worker}
        if len({r for _, r in places}) > 1:
            raise PlanError(
                f"workers of the plan's stages: {plan.workers[worker].name}",
                got="stages of several holders: "
                + ", ".join(f"stage {stage} as holder {r}" for stage, r in sorted(places)),
                expected="the same place in each stage that it alternates",
                remedy="Correct `workers` of the plan's stages, or write a new plan with `roundelay plan`.",
            )
    for stage in range(plan.num_stages):
        kinds = {plan.workers[worker].device.split(":")[0] for worker in plan.holders(stage)}
        if len(kinds) > 1:
            raise PlanError(
                f"stages[{stage}].workers of the plan",
                got="holders on " + " and ".join(sorted(kinds)),
                expected="one kind of device for all holders of a stage: the same operation has other bits on another",
                remedy="Correct --devices, or `device` of the plan's workers.",
            )


def _check_exchange_kinds(reading: Reading) -> None:
    """Check the exchanges as far as that is possible without the model."""
    plan = reading.plan
    sums = reading.sums_over_time
    due = [(stage, WEIGHT_GRADIENT) for stage in range(plan.num_stages)] if plan.replicas > 1 or sums else []
    of_replicas = [exchange for exchange in plan.exchanges if exchange.axis == REPLICAS]
    by = () if sums else all_reduce()
    got = [(e.stage, e.kind) for e in of_replicas if e.phases == by]
    if got != due or (len(of_replicas) > len(got) and not plan.states):
        every = ",".join(map(str, by)) or "no phases"
        raise PlanError(
            "exchanges of the plan",
            got=", ".join(f"{e.kind} of stage {e.stage} by {','.join(map(str, e.phases))}" for e in of_replicas)
            or "none",
            expected=", ".join(f"{kind} of stage {stage} by {every}" for stage, kind in due) or "none: one replica",
            remedy="Correct the plan, or write a new one with `roundelay plan`.",
        )
    axes = plan.grid.sizes
    for i, exchange in enumerate(plan.exchanges):
        phases = exchange.phases
        known = exchange.kind in EXCHANGES and exchange.axis in axes and exchange.stage < plan.num_stages
        summed = exchange.kind != WEIGHT_GRADIENT or phases == by or (plan.states and phases == reduce_scatter())
        summed = summed and (exchange.kind != GRADIENT_PARTS or phases == reduce_scatter())
        summed = summed and (exchange.kind not in USED or phases == all_gather())
        if not (known and (phases or sums) and summed) or len(exchange.dtypes) != len(exchange.shapes):
            raise PlanError(
                f"exchanges[{i}] of the plan",
                got=f"{exchange.kind} of stage {exchange.stage} over {exchange.axis} by {', '.join(map(str, phases))}, "
                f"of {len(exchange.dtypes)} dtypes and {len(exchange.shapes)} shapes",
                expected=f"{', '.join(EXCHANGES)} of a stage, over an axis of the plan, gradients of weights by "
                + ", ".join(map(str, all_reduce()))
                + ", and a shape for each dtype",
                remedy="Correct the plan, or write a new one with `roundelay plan`.",
            )


def check_mesh(reading: Reading) -> None:
    """Check what a mesh can be combined with."""
    plan = reading.plan
    if {REPLICAS, COPIES, SHARDS} & {*plan.mesh} or any(size < 1 for size in plan.mesh.values()):
        raise PlanError(
            "mesh of the plan",
            got=", ".join(f"{axis} = {size}" for axis, size in plan.mesh.items()),
            expected="a number of workers from 1 for each axis, none of which is called "
            f"{REPLICAS}, {COPIES} or {SHARDS}",
            remedy="Correct the plan.",
        )
    _check_states(reading)
    if plan.mesh_size == 1:
        return
    refused = {
        "mesh": (len(plan.mesh) > 1, ", ".join(plan.mesh), "one axis: several are not carried out yet"),
        "compile": (plan.compile, "true", "false: the parts of a stage between boxings are not compiled yet"),
        "backward": (
            plan.backward == "recompute",
            plan.backward,
            "stash or mixed: that mode runs a stage again as a whole, without its boxings",
        ),
        "clip": (plan.clip.by == "stage", plan.clip, "none, previous:NORM or global:NORM"),
        "predictor": (plan.predictor == "partial", plan.predictor, "another: a worker knows its part of a sum only"),
        "precision": (
            plan.loss_scale.on and reading.schedule.window != "batch",
            plan.precision,
            "fp32 or bf16: a worker of the mesh alone does not know whether a gradient is finite",
        ),
    }
    for name, (wrong, got, expected) in refused.items():
        if wrong:
            raise PlanError(
                f"{name} of the plan, with a mesh",
                got=str(got),
                expected=expected,
                remedy="Change that, or remove --tensor-parallel or the plan's mesh.",
            )


def _check_states(reading: Reading) -> None:
    """Check what a split of the optimizer's states can be combined with."""
    plan = reading.plan
    refused = {
        "replicas": (plan.replicas == 1, "1", "2 or more, over which the states are split", "Give --data-parallel 2"),
        "shards": (
            bool(plan.shards) and (plan.shards < 2 or plan.replicas % plan.shards > 0 or plan.shards == plan.replicas),
            f"{plan.shards} of {plan.replicas} replicas",
            "0, or a divisor of the replicas other than 1 and themselves",
            "Correct it",
        ),
        "predictor": (
            plan.predictor == "partial",
            plan.predictor,
            "another: a replica knows its part of a sum only",
            "Give another --predictor, or a rule that has one",
        ),
        "clip": (plan.clip.by == "stage", plan.clip, "none, previous:NORM or global:NORM", "Give another --clip"),
        "precision": (
            plan.loss_scale.on and reading.schedule.window != "batch",
            plan.precision,
            "fp32 or bf16: a replica alone does not know whether a gradient is finite",
            "Give --precision bf16, or a rule that flushes, such as 1f1b",
        ),
    }
    if "weights" in plan.sharded or plan.predictor != NO_PREDICTOR:
        refused |= {
            "backward": (
                plan.backward == "recompute",
                plan.backward,
                "mixed or stash: that mode runs a whole stage",
                "Give --backward stash or mixed",
            ),
            "compile": (
                plan.compile,
                "true",
                "false: parts of a stage between exchanges are not compiled yet",
                "Leave --compile out",
            ),
        }
    if plan.sharded not in [SHARDED[: i + 1] for i in range(len(SHARDED))]:
        raise PlanError(
            "sharded of the plan",
            got=", ".join(plan.sharded) or "nothing",
            expected="the first, or the first few, of " + ", ".join(SHARDED),
            remedy="Correct it; what is in the plan's [states] is split so.",
        )
    for name, (wrong, got, expected, remedy) in refused.items():
        if wrong and plan.states:
            raise PlanError(
                f"{name} of the plan, with split states",
                got=str(got),
                expected=expected,
                remedy=f"{remedy}, or leave out what splits them: --zero, --hybrid, or the plan's [states].",
            )
