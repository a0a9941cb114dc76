"""Resume from a checkpoint: load it, whether a run can continue in mid-flight, the initial state of the stages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.checkpoint import Checkpoint
from roundelay.checkpoint.in_flight_state import Flights, InFlight, StageInFlight
from roundelay.checkpoint.stored_files import inside_run
from roundelay.errors import CheckpointError
from roundelay.frontend import Captured
from roundelay.ir.averages import EMA, EVALUATED
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.lower.emit import emit
from roundelay.lower.validate_plan import check_plan
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.optimizer.stage_optimizer import RateTable
from roundelay.schedules import schedule_named

TRAINED = "trained parameters"


def load_checkpoint(path: Path, captured: Captured, *, lazily: bool = False) -> Checkpoint:
    """Load a checkpoint into the captured model, and return it.

    Args:
        path: the checkpoint, or the run folder that has it.
        captured: the model.
        lazily: map the parameters from the files instead of copying them, for a model whose job loads its weights so;
            nothing may write into them.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    start = store.load(inside_run(path))
    names = {n: tuple(p.shape) for n, p in captured.model.named_parameters()}
    saved = {n: tuple(t.shape) for n, t in start.parameters.items()}
    if names != saved:
        odd = next(n for n in [*names, *saved] if names.get(n) != saved.get(n))
        raise CheckpointError(
            f"checkpoint {path}, parameter {odd!r}",
            got=f"shape {saved.get(odd, 'none: it is missing')}",
            expected=f"shape {names.get(odd, 'none: the model has no such parameter')}",
            remedy="Continue with the job that wrote the checkpoint.",
        )
    mapped = captured.parameters() if lazily else {}
    try:
        for name, own in mapped.items():
            captured.set_parameter(name, laid_out(own.data, start.parameters[name].to(own.dtype)))
        copied = {name: weight for name, weight in start.parameters.items() if name not in mapped}
        captured.model.load_state_dict({**copied, **start.buffers}, strict=False)
    except Exception as error:  # a buffer of another size, or a hook of the user's
        raise CheckpointError(
            f"checkpoint {path}",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="tensors that the model's load_state_dict takes",
            remedy="Continue with the job that wrote the checkpoint.",
        ) from error
    return start


def check_optimizer(start: Checkpoint, kinds: Sequence[str]) -> None:
    """Refuse to continue with another optimizer than the one whose state a checkpoint has.

    Args:
        start: the checkpoint.
        kinds: names of the job's optimizer class and its bases, in method resolution order.

    Raises:
        CheckpointError: it is another one.
    """
    saved = start.optimizer_kind
    entries = sorted({key for state in start.optimizer.values() for key in state} - {EMA, EVALUATED})
    if not saved or saved in kinds or not entries:
        return
    raise CheckpointError(
        "the optimizer that the run continues with",
        got=f"{kinds[0]}, but a checkpoint of {saved}, with {', '.join(entries)} of every parameter",
        expected=f"{saved}: its state means nothing to another optimizer",
        remedy=f"Continue with {saved}; or begin a new run with the weights alone: leave --from out, and call "
        "roundelay.load(model, RUN) in job().",
    )


def order_of(plan: Plan, captured: Captured) -> dict[str, str]:
    """All choices that determine the order of work and the versions read, by their names for users.

    Devices, transport and number of slots are not included: a run may continue with others. Trained parameters are: a
    run that continues with others than its checkpoint's (some are frozen no more) starts with empty stages, and without
    optimizer state of those that were frozen.
    """
    programs = sorted(emit(check_plan(plan)), key=lambda program: program.stages)
    blocks = [(program.over, program.every, *map(str, program.body)) for program in programs]
    names = [name for name, parameter in captured.model.named_parameters() if parameter.requires_grad]
    every = sum(1 for _ in captured.model.parameters())
    return {
        "workers": str(plan.num_workers),
        "replicas": str(plan.replicas),
        "layout": plan.layout,
        "micro-batches": str(plan.micro_batches),
        "rule": plan.rule,
        "predictor": plan.predictor,
        "backward": plan.backward,
        "cuts": " ".join(",".join(stage.segments) for stage in plan.stages),
        "programs": "; ".join(" ".join(map(str, block)) for block in blocks),
        TRAINED: f"{len(names)} of {every} ({hashlib.sha256(repr(names).encode()).hexdigest()[:8]})",
    }


def values_digest(values: Mapping[str, torch.Tensor]) -> str:
    """A quick digest of a run's initial tensors: names, shapes, first elements and sums; empty for meta tensors."""
    hashed = hashlib.sha256()
    for name, value in values.items():
        if value.is_meta:
            return ""
        real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        first = real.reshape(-1)[:8].double().tolist()
        hashed.update(repr((name, tuple(value.shape), first, real.sum(dtype=torch.float64).item())).encode())
    return hashed.hexdigest()[:16]


def reads_older(plan: Plan) -> bool:
    """Whether a run by this plan reads weights that are older than the newest, as one whose stages never empty does."""
    rule = rule_named(plan.rule)
    return schedule_named(rule.schedule).window != "batch" and (plan.num_stages > 1 or rule.versions != "newest")


def computing_digest(plan: Plan, order: Mapping[str, str], rates: RateTable, seed: int) -> str:
    """A digest of all that determines updates: the plan, and options and rates of the job's optimizer.

    Returns:
        empty where the rule does not flush: the end of a run then drains the stages, which changes later updates.
    """
    if schedule_named(rule_named(plan.rule).schedule).window != "batch":
        return ""
    choices = str(plan.clip), plan.ema, plan.precision, str(plan.loss_scale), plan.compile, plan.devices, seed
    options = [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in group.items() if not callable(v)}
        for group in rates.group_options
    ]
    first_rates = [rates.at(update) for update in range(16 if rates.scheduled else 1)]
    return hashlib.sha256(repr((dict(order), choices, rates.kinds, options, first_rates)).encode()).hexdigest()[:16]


def changed(flight: InFlight, order: Mapping[str, str]) -> str:
    """A message on what differs from the checkpoint's order of work; empty if nothing does."""
    saved = flight.order if TRAINED in flight.order else {**flight.order, TRAINED: order.get(TRAINED, "")}
    before = {name: saved.get(name, "nothing") for name in order}
    differing = [name for name in order if before[name] != order[name]]
    if not differing:
        return ""
    shown = [name for name in differing if name not in ("cuts", "programs")]
    if shown:
        return "the plan changed: " + ", ".join(f"{name} from {before[name]} to {order[name]}" for name in shown)
    return "the plan changed: " + ("other cuts" if "cuts" in differing else "the rule's programs")


def initial(captured: Captured, start: Checkpoint | None, flight: Flights | None) -> Initial:
    """The initial state of the stages: the model's tensors, or the checkpoint's with the strides of the model's.

    A file has contiguous tensors, and other strides may select another kernel, hence give other last bits.

    Args:
        captured: the model.
        start: checkpoint to start from.
        flight: what every stage has in flight, unless it is dropped.
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
    stages = None if flight is None else {port: _flight_laid_out(own, stage) for port, stage in flight.items()}
    others = tuple(
        {n: laid_out(b, own_buffers.get(n, b)).clone() for n, b in captured.buffers().items() if n in own_buffers}
        for own_buffers in start.replica_buffers
    )
    position = start.position.updates
    return Initial(parameters, buffers, optimizer, position, stages, start.loss_scale, start.numbers, others)


def _flight_laid_out(own: Mapping[str, torch.Tensor], stage: StageInFlight) -> StageInFlight:
    return replace(stage, weights={key: _all_laid_out(own, weights) for key, weights in stage.weights.items()})


def _all_laid_out(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: laid_out(own[name], tensor) for name, tensor in tensors.items()}


def laid_out(own: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of ``own``; unchanged if it has them already or is of another shape."""
    if own.shape != tensor.shape or own.stride() == tensor.stride():
        return tensor
    return torch.empty_like(own, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)
