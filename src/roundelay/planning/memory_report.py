"""Predicted and measured memory of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.ir.stage import Partition
from roundelay.ir.transports import transport_named
from roundelay.job import Job
from roundelay.planner.memory_model import estimate_memory
from roundelay.runtime.optimizer.optimizer_wrappers import all_states
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, groups_of
from roundelay.weight_prediction import needs_displacement, needs_gradient


def optimizer_bytes(job: Job, captured: Captured, partition: Partition, plan: Plan) -> list[int] | None:
    """Bytes of each stage's optimizer state, weight averages, and what weight prediction keeps of the last update.

    They are those of the first holder of each stage. None if the optimizer cannot step on meta tensors.

    Args:
        job: whose optimizer is used.
        captured: the model; not changed.
        partition: the stages.
        plan: whose predictor and averages are counted.
    """
    held = held_by_optimizer(job, captured, plan)
    return None if held is None else [sum(held.get(name, 0) for name in stage.parameters) for stage in partition.stages]


def held_by_optimizer(job: Job, captured: Captured, plan: Plan) -> dict[str, int] | None:
    """The same of each parameter, by name; runs one step of the optimizer on meta tensors."""
    named = [(n, _updated(captured, plan, n, p)) for n, p in captured.model.named_parameters()]
    try:
        optimizer = build_optimizer(job.optimizer, named)
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False  # fused kernels refuse meta tensors; the state is the same
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    except Exception:  # the user's own code may not support meta tensors
        return None
    states = [state for _, state in all_states(optimizer)]
    held = {n: sum(_state_bytes(state.get(p, {})) for state in states) for n, p in named}
    if plan.ema:
        for name, p in named:
            held[name] += p.requires_grad * p.nbytes
    if (predictor := plan.predictor) != NO_PREDICTOR:
        names = {id(p): n for n, p in named}
        for _, group, p in groups_of(optimizer):
            copies = needs_displacement(optimizer, group, predictor) + needs_gradient(optimizer, group, predictor)
            held[names[id(p)]] += copies * p.nbytes
    for name, p in named:  # a part of a weight is held beside the whole, unless that is gathered for use
        own = captured.residences.get(name)
        held[name] += p.nbytes * (own is not None and not own.is_gathered)
    return held


def _updated(captured: Captured, plan: Plan, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """What the first holder updates of a parameter, on the meta device."""
    local = captured.local(name, parameter.detach().to("meta"), 0)
    return torch.nn.Parameter(captured.owned(name, local, (plan.grid.shards, 0)), parameter.requires_grad)


def _state_bytes(state: Mapping[str, Any]) -> int:
    return sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))


def memory_report(
    plan: Plan,
    of_optimizer: Sequence[int] | None,
    workers: Mapping[int, Mapping[str, Any]],
    tapes: Sequence[int],
) -> list[dict[str, Any]]:
    """For each worker the predicted bytes, item by item, and the measured ones, as JSON values.

    Args:
        plan: the plan.
        of_optimizer: for each stage, from :func:`optimizer_bytes`; if None, it and the total are None.
        workers: worker to its final report.
        tapes: for each worker, the most bytes that its tapes took.
    """
    pids = Counter(data["pid"] for data in workers.values())
    rows = []
    for k, predicted in enumerate(estimate_memory(plan, of_optimizer or [0] * plan.num_stages)):
        data = workers[k]
        known = of_optimizer is not None
        rows.append(
            {
                "predicted": {
                    **predicted.items(),
                    "optimizer": predicted.optimizer if known else None,
                    "total": predicted.total if known else None,
                },
                **data["held_bytes"],
                "peak_tensor_bytes": data["device_peak_bytes"] or sum(data["held_bytes"].values()) + tapes[k],
                "private_bytes": data["private_bytes"],
                "rss_at_start_bytes": data["rss_at_start_bytes"],
                "peak_rss_bytes": data["peak_rss_bytes"],
                "process_shared": transport_named(plan.transport).workers == "threads" or pids[data["pid"]] > 1,
            }
        )
    return rows
