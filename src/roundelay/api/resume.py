"""Whether a run can go on in mid-flight from a checkpoint, why not, and where its stages start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from roundelay.checkpoint.checkpoint import Checkpoint
from roundelay.checkpoint.in_flight import InFlight, StageInFlight
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.lower.verify_schedule import programs_of
from roundelay.runtime.stage_optimizer import RateTable
from roundelay.runtime.stage_state import Initial
from roundelay.schedules import schedule_named

TRAINED = "trained parameters"


def order_of(plan: Plan) -> dict[str, str]:
    """What the order of work and the versions read depend on, by what a person calls it.

    Where stages run, how they talk and how many slots they have is no part of it: a run goes on over another transport.
    """
    programs = sorted(programs_of(plan), key=lambda program: program.stages)
    blocks = [(program.over, program.every, *map(str, program.body)) for program in programs]
    return {
        "workers": str(plan.num_workers),
        "micro-batches": str(plan.micro_batches),
        "rule": plan.rule,
        "predictor": plan.predictor,
        "backward": plan.backward,
        "cuts": " ".join(",".join(stage.segments) for stage in plan.stages),
        "programs": "; ".join(" ".join(map(str, block)) for block in blocks),
    }


def trained(captured: Captured) -> dict[str, str]:
    """Which parameters are trained, as the order of work is told: what is in flight was computed for these.

    A run may go on with others than its checkpoint's (a part that was frozen is unfrozen): then it starts with empty
    stages, and the optimizer has no state yet of what was frozen until now.
    """
    table = captured.model.named_parameters()
    names = [name for name, parameter in table if parameter.requires_grad]
    every = sum(1 for _ in captured.model.parameters())
    return {TRAINED: f"{len(names)} of {every} ({hashlib.sha256(repr(names).encode()).hexdigest()[:8]})"}


def values_digest(values: Mapping[str, torch.Tensor]) -> str:
    """A quick digest of what a run begins with, by name: shapes, first elements and sums; empty without values."""
    made = hashlib.sha256()
    for name, value in values.items():
        if value.is_meta:
            return ""
        real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        few = real.reshape(-1)[:8].double().tolist()
        made.update(repr((name, tuple(value.shape), few, real.sum(dtype=torch.float64).item())).encode())
    return made.hexdigest()[:16]


def computing_digest(plan: Plan, order: Mapping[str, str], rates: RateTable, seed: int) -> str:
    """A digest of what updates are computed by: the plan, and options and rates of the job's optimizer.

    Returns:
        empty where the rule does not flush: an end of a run drains the stages then, which changes what follows.
    """
    if schedule_named(rule_named(plan.rule).schedule).window != "batch":
        return ""
    by = plan.clip, plan.ema, plan.precision, plan.loss_scale, plan.compile, plan.devices, seed
    options = [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in group.items() if not callable(v)}
        for group in rates.made_with
    ]
    ahead = [rates.at(update) for update in range(16 if rates.scheduled else 1)]
    return hashlib.sha256(repr((dict(order), by, rates.kinds, options, ahead)).encode()).hexdigest()[:16]


def changed(flight: InFlight, order: Mapping[str, str]) -> str:
    """What of the order is another than the checkpoint's, for people; empty if nothing is."""
    known = flight.order if TRAINED in flight.order else {**flight.order, TRAINED: order.get(TRAINED, "")}
    was = {name: known.get(name, "nothing") for name in order}
    odd = [name for name in order if was[name] != order[name]]
    if not odd:
        return ""
    told = [name for name in odd if name not in ("cuts", "programs")]
    if told:
        return "the plan changed: " + ", ".join(f"{name} from {was[name]} to {order[name]}" for name in told)
    return "the plan changed: " + ("other cuts" if "cuts" in odd else "what the rule's programs say")


def initial(captured: Captured, start: Checkpoint | None, flight: tuple[StageInFlight, ...] | None) -> Initial:
    """Where stages start: with the model's own tensors, or a checkpoint's, which are laid out as the model's are.

    A file holds them contiguous, and other strides can mean another kernel, hence other last bits.

    Args:
        captured: the model.
        start: checkpoint to start from.
        flight: what of it is in flight and not dropped.
    """
    if start is None:
        return Initial(
            {n: p.data for n, p in captured.parameters().items()},  # stages copy what they train
            {n: b.clone() for n, b in captured.buffers().items()},
            {},
            0,
        )
    own = dict(captured.model.named_parameters())
    parameters = _all_laid_out(own, start.parameters)
    buffers = {n: laid_out(b, start.buffers.get(n, b)).clone() for n, b in captured.buffers().items()}
    optimizer = {
        n: {k: laid_out(own[n], v) if isinstance(v, torch.Tensor) and n in own else v for k, v in state.items()}
        for n, state in start.optimizer.items()
    }
    stages = None if flight is None else tuple(_flight_laid_out(own, stage) for stage in flight)
    return Initial(parameters, buffers, optimizer, start.position.updates, stages, start.loss_scale, start.numbers)


def _flight_laid_out(own: Mapping[str, torch.Tensor], stage: StageInFlight) -> StageInFlight:
    return replace(stage, weights={key: _all_laid_out(own, weights) for key, weights in stage.weights.items()})


def _all_laid_out(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: laid_out(own[name], tensor) for name, tensor in tensors.items()}


def laid_out(own: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with strides as ``own`` has them; itself if it has, or if it is of another shape."""
    if own.shape != tensor.shape or own.stride() == tensor.stride():
        return tensor
    return torch.empty_like(own, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)
