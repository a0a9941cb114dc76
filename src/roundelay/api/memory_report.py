"""What the plan predicts that workers hold, beside what they have held."""

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
from roundelay.runtime.optimizer_wrappers import all_states
from roundelay.runtime.stage_optimizer import build_optimizer, groups_of
from roundelay.weight_prediction import needs_displacement, needs_gradient


def optimizer_bytes(job: Job, captured: Captured, partition: Partition, plan: Plan) -> list[int] | None:
    """Bytes of each stage's optimizer state, of averages, and of what prediction keeps of the last update.

    One step is made with parameters and gradients that have shapes and no memory. None if this optimizer cannot do so.

    Args:
        job: its optimizer.
        captured: the model; not touched.
        partition: the stages.
        plan: its predictor, and whether it keeps averages.
    """
    named = [
        (n, torch.nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
        for n, p in captured.model.named_parameters()
    ]
    try:
        optimizer = build_optimizer(job.optimizer, named)
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False  # a fused kernel refuses tensors without memory; the state is the same
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    except Exception:  # the person's own code, asked something unusual: then nothing is predicted
        return None
    states = [state for _, state in all_states(optimizer)]
    held = {n: sum(_state_bytes(state.get(p, {})) for state in states) for n, p in named}
    if plan.ema:
        for name, p in named:
            held[name] += p.requires_grad * p.numel() * p.element_size()
    if (predictor := plan.predictor) != NO_PREDICTOR:
        names = {id(p): n for n, p in named}
        for _, group, p in groups_of(optimizer):
            copies = needs_displacement(optimizer, group, predictor) + needs_gradient(optimizer, group, predictor)
            held[names[id(p)]] += copies * p.numel() * p.element_size()
    return [sum(held.get(name, 0) for name in stage.parameters) for stage in partition.stages]


def _state_bytes(state: Mapping[str, Any]) -> int:
    return sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))


def memory_report(
    plan: Plan, of_optimizer: Sequence[int] | None, workers: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each worker what is predicted, item by item, and what was measured; as JSON knows it.

    Args:
        plan: the plan.
        of_optimizer: for each stage, as :func:`optimizer_bytes` says; None leaves it out and the total with it.
        workers: worker to its final account.
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
                "private_bytes": data["private_bytes"],
                "rss_at_start_bytes": data["rss_at_start_bytes"],
                "peak_rss_bytes": data["peak_rss_bytes"],
                "process_shared": transport_named(plan.transport).workers == "threads" or pids[data["pid"]] > 1,
            }
        )
    return rows
