"""The sides of a comparison: plain PyTorch, then the captured job, then its evaluation; on the CPU each in a child.

They return values that can be written as JSON; tensors are stored in memory that is shared with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from typing import Any

import torch

from roundelay.errors import RoundelayError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, copy_batch, num_rows, part_rows, split
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.ir.averages import EMA
from roundelay.ir.clip import NO_CLIP
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.ir.transports import transport_named
from roundelay.job import Job
from roundelay.planning.compile_stages import compile_stages, for_plan
from roundelay.proof.captured_stepper import CapturedStepper, Tensors
from roundelay.proof.fidelity_differences import FidelityDifference
from roundelay.proof.fidelity_in_process import move
from roundelay.proof.plain_stepper import MicroBatchPart, PlainStepper, Update, seed_of
from roundelay.proof.same_draws import KEY, same_draws
from roundelay.proof.shared_memory_tensors import SharedTensors
from roundelay.reach.source_lines import place_of
from roundelay.runtime.optimizer.nested_state import same_value
from roundelay.session.checkpointing import averages, evaluate, holding_averages, put
from roundelay.session.state_gather import Snapshot


@dataclass(frozen=True, slots=True)
class FidelityCase:
    """One comparison of a captured job with plain PyTorch.

    Args:
        job: the job.
        captured: its model.
        plan: what to run.
        seed: of the run.
        batches: a batch for each update, and its epoch.
        evaluates: also compare the results of ``evaluate``.
        same_draws: every random operation draws from the same seed, however many numbers were drawn before.
        device: the device on which both sides train.
        in_process: both train in the calling process, so that what they change must be put back.
    """

    job: Job
    captured: Captured
    plan: Plan
    seed: int
    batches: tuple[tuple[Batch, int], ...]
    evaluates: bool
    same_draws: bool = False
    device: torch.device = CPU
    in_process: bool = False


def _parts(case: FidelityCase, *, plain: bool) -> Iterator[list[MicroBatchPart]]:
    """The micro-batches of every batch; in plain PyTorch, an uncut batch stays as the loader returned it."""
    g = 0
    for t, (batch, epoch) in enumerate(case.batches):
        rows = num_rows(batch)
        least = case.captured.graph.min_rows
        sizes = part_rows(batch, case.plan.batch_parts, least)
        own = copy_batch(batch)
        # copies: with a view's other alignment a kernel may round differently
        cut = [own] if plain and len(sizes) == 1 else [copy_batch(part) for part in split(own, len(sizes), least)]
        micro_batches = []
        for i, (size, part) in enumerate(zip(sizes, cut, strict=True)):
            micro_batches.append((MicroBatch(g, t, i, len(sizes), size, rows, epoch, 0, 0), part))
            g += 1
        yield micro_batches


@contextmanager
def _quiet(case: FidelityCase, *, plain: bool = False) -> Iterator[None]:
    """A context that discards what the user's code prints and warns of: it does so again in the run."""
    written_out = plain and case.device != CPU
    drawing = same_draws(written_out=written_out) if case.same_draws else nullcontext()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings(), drawing:
        warnings.simplefilter("ignore")
        yield


def run_plain(case: FidelityCase, shared: SharedTensors) -> dict[str, Any]:
    """Train in plain PyTorch; returns what each update has shown."""
    if case.in_process:
        move(case.job, case.device)
    with _quiet(case, plain=True):
        each = case.captured.graph.labels_per_row
        plain = PlainStepper(case.job, case.plan, case.seed, shared, labels_per_row=each, device=case.device)
        updates = [asdict(plain.update(parts)) for parts in _parts(case, plain=True)]
        results: dict[str, Any] = {"updates": updates, "averages": shared.put_all(plain.averages), "end": shared.end}
        if not case.evaluates:
            return results
        if plain.has_eval_mode:
            plain.optimizer.eval()  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, parameter in plain.named:
                parameter.data = plain.averages.get(name, parameter.data)
        if case.device != CPU:
            move(case.job, CPU)  # where a run evaluates
        return results | _evaluated(case)


def _evaluated(case: FidelityCase) -> dict[str, Any]:
    """The results of ``evaluate`` on the model as it is now, or why it failed."""
    torch.manual_seed(seed_of(case.seed, len(case.batches)))
    try:
        evaluated, _ = evaluate(case.job, case.captured.model, len(case.batches), case.batches[-1][1])
    except RoundelayError as error:
        return {"failed": error.got}
    return {"evaluated": evaluated.metrics}


def run_captured(
    case: FidelityCase, shared: SharedTensors, stages: Partition, plain: Mapping[str, Any]
) -> dict[str, Any]:
    """Train the captured job and compare it with plain PyTorch's results."""
    plan, captured = case.plan, for_plan(case.captured, case.plan)
    draws = any(op.draws >= 0 for op in captured.graph.ops)
    with _quiet(case):
        if plan.compile and draws:
            captured = captured.compiling(None)
        elif plan.compile:
            compile_stages(case.job, captured, plan, stages, case.seed)
        has_counterpart = plan.clip.by == "global"
        compared = plan if has_counterpart else replace(plan, clip=NO_CLIP)
        with torch.no_grad():
            drawn = KEY if case.same_draws and case.device != CPU else None
            stepper = CapturedStepper(case.job, captured, compared, stages, case.seed, shared, case.device, drawn)
            results = _compare(case, stepper, shared, plain)
    checker = stepper.checker
    return results | {
        "exact": checker.exact,
        "updates": checker.updates,
        "gradients": len(checker.gradients_seen),
        "tensors": checker.compared,
        "operator": checker.operator,
        "shifted": checker.shifted,
        "notes": checker.notes,
        "draws": draws,
        "counts": captured.graph.loss_counts,
        "buffers": len(stepper.buffers()),
    }


def _compare(
    case: FidelityCase, stepper: CapturedStepper, shared: SharedTensors, plain: Mapping[str, Any]
) -> dict[str, Any]:
    """The first difference, if any; and whether ``evaluate`` was compared, or the weights with which to compare it."""
    try:
        for parts, update in zip(_parts(case, plain=False), plain["updates"], strict=True):
            stepper.update(parts, Update(**update))
        own = stepper.averages()
        for name, theirs in shared.get_all(plain["averages"]).items():
            if name in own and not same_value(own[name], theirs):
                raise FidelityDifference("optimizer", f"the moving average of parameter {name!r}")
        if not case.evaluates:
            return {"difference": "", "kind": ""}
        final = _snapshot(case, stepper.weights(), stepper.buffers(), stepper.states())
        if transport_named(case.plan.transport).forks:
            shared.continue_at(plain["end"])
            kept = {"parameters": final.parameters, "buffers": final.buffers, "averages": averages(final.optimizer)}
            stored = {name: shared.put_all(tensors) for name, tensors in kept.items()}
            return {"difference": "", "kind": "", "final": stored}
        return _evaluation(case, final, plain)
    except FidelityDifference as difference:
        return {"difference": difference.text + _where(case.job.model, difference.text), "kind": difference.kind}


def _snapshot(case: FidelityCase, weights: Tensors, buffers: Tensors, states: dict[str, dict[str, Any]]) -> Snapshot:
    """The state at the end, as a run passes it to ``evaluate``: on the CPU."""
    header = MicroBatch(0, len(case.batches) - 1, 0, 1, 1, 1, case.batches[-1][1], 1, 1)
    weights, buffers = ({n: t.to(CPU) for n, t in tensors.items()} for tensors in (weights, buffers))
    return Snapshot(header, weights, buffers, states)


def evaluate_in_child(
    case: FidelityCase, shared: SharedTensors, results: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, Any]:
    """Evaluate in a process in which no stage was trained, as in a run whose workers are processes."""
    final = {name: shared.get_all(index) for name, index in results["final"].items()}
    states = {name: {EMA: average} for name, average in final["averages"].items()}
    with _quiet(case):
        try:
            return _evaluation(case, _snapshot(case, final["parameters"], final["buffers"], states), plain)
        except FidelityDifference as difference:
            return {"difference": difference.text, "kind": difference.kind}


def _evaluation(case: FidelityCase, final: Snapshot, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the results of ``evaluate`` with the captured job's weights in the user's model.

    Raises:
        FidelityDifference: they differ from plain PyTorch's.
    """
    put(case.captured, final)
    with holding_averages(case.captured, final.optimizer):
        own = _evaluated(case)
    result = {"difference": "", "kind": "", "evaluated": False}
    if "failed" in plain and "failed" in own:
        return result | {"evaluate_failed": own["failed"]}
    for side, side_name in ((own, "the captured job"), (plain, "plain PyTorch")):
        if "failed" in side:
            raise FidelityDifference("evaluate", f"evaluate fails with {side_name} only: {side['failed']}")
    ours, theirs = own["evaluated"], plain["evaluated"]
    for name in dict.fromkeys([*theirs, *ours]):
        if repr(ours.get(name)) != repr(theirs.get(name)):
            raise FidelityDifference(
                "evaluate", f"the number {name!r} of evaluate: {ours.get(name)} instead of {theirs.get(name)}"
            )
    return result | {"evaluated": True}


def _where(model: torch.nn.Module, text: str) -> str:
    """Where the user's code sets the buffer or parameter that differs, if it can be found in the source."""
    for kind in ("buffer", "parameter"):
        _, mentioned, rest = text.partition(f"{kind} '")
        if not mentioned:
            continue
        path, _, name = rest.partition("'")[0].rpartition(".")
        try:
            where = place_of(type(model.get_submodule(path)), name)
        except AttributeError:
            return ""
        return f" (set in {where})" if where else ""
    return ""
