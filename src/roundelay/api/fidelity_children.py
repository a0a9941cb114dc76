"""What the children of a comparison do: plain PyTorch in one, the captured job in another, evaluations in a third.

All of them return what JSON can hold; tensors lie in a room that was shared before they were forked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.api.captured_stepper import CapturedStepper
from roundelay.api.checkpointing import averages, evaluate, holding_averages, put
from roundelay.api.compile_stages import compile_stages, for_plan
from roundelay.api.fidelity_differences import Difference, same
from roundelay.api.plain_stepper import Part, PlainStepper, Update, seed_of
from roundelay.api.shared_tensors import Index, SharedTensors
from roundelay.api.state_gather import Snapshot
from roundelay.errors import RoundelayError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, copy_batch, num_rows, part_rows, split
from roundelay.frontend.source_lines import place_of
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import EMA, Plan
from roundelay.ir.stage import Partition
from roundelay.ir.transports import transport_named
from roundelay.job import Job


@dataclass(frozen=True, slots=True)
class Judged:
    """What is compared, and on what.

    Args:
        job: the job.
        captured: its model.
        plan: what to run.
        seed: of the run.
        batches: a batch for each update, and its epoch.
        evaluates: whether what ``evaluate`` says is compared.
        same_draws: every random operation draws the same numbers, however many were drawn before.
    """

    job: Job
    captured: Captured
    plan: Plan
    seed: int
    batches: tuple[tuple[Batch, int], ...]
    evaluates: bool
    same_draws: bool = False


def _parts(judged: Judged, *, plainly: bool) -> Iterator[list[Part]]:
    """The micro-batches of every batch; for plain PyTorch a batch that is not cut stays as the loader gave it."""
    g = 0
    for t, (batch, epoch) in enumerate(judged.batches):
        rows = num_rows(batch)
        least = judged.captured.graph.min_rows
        sizes = part_rows(batch, judged.plan.micro_batches, least)
        own = copy_batch(batch)
        # parts in memory of their own: a kernel may tell a view that begins elsewhere, and round otherwise
        cut = [own] if plainly and len(sizes) == 1 else [copy_batch(part) for part in split(own, len(sizes), least)]
        made = []
        for i, (size, part) in enumerate(zip(sizes, cut, strict=True)):
            made.append((MicroBatch(g, t, i, len(sizes), size, rows, epoch, 0, 0), part))
            g += 1
        yield made


@contextmanager
def _quiet(judged: Judged) -> Iterator[None]:
    """What the person's code prints, and warns of, it does so again when it is trained."""
    drawing = _SameDraws() if judged.same_draws else nullcontext()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings(), drawing:
        warnings.simplefilter("ignore")
        yield


@final
class _SameDraws(TorchDispatchMode):
    """Seeds torch's own generator anew before every operation that draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(_SEED)
        return func(*args, **(kwargs or {}))


_SEED = 20_260_101


def plainly(judged: Judged, room: SharedTensors) -> dict[str, Any]:
    """What plain PyTorch does."""
    with _quiet(judged):
        each = judged.captured.graph.labels_per_row
        plain = PlainStepper(judged.job, judged.plan, judged.seed, room, labels_per_row=each)
        made = [asdict(plain.update(parts)) for parts in _parts(judged, plainly=True)]
        found: dict[str, Any] = {"updates": made, "averages": room.leave(plain.averages), "end": room.end}
        if not judged.evaluates:
            return found
        if plain.switches:
            plain.optimizer.eval()  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, parameter in plain.named:
                parameter.data = plain.averages.get(name, parameter.data)
        return found | _evaluated(judged)


def _evaluated(judged: Judged) -> dict[str, Any]:
    """What ``evaluate`` says of the model as it stands, or why it says nothing."""
    torch.manual_seed(seed_of(judged.seed, len(judged.batches)))
    try:
        found, _ = evaluate(judged.job, judged.captured.model, len(judged.batches), judged.batches[-1][1])
    except RoundelayError as error:
        return {"failed": error.got}
    return {"evaluated": found.metrics}


def beside(judged: Judged, room: SharedTensors, stages: Partition, plain: Mapping[str, Any]) -> dict[str, Any]:
    """What the captured job does, compared with it."""
    plan, captured = judged.plan, for_plan(judged.captured, judged.plan)
    draws = any(op.draws >= 0 for op in captured.graph.ops)
    with _quiet(judged):
        if plan.compile and draws:
            captured = captured.compiling(None)
        elif plan.compile:
            compile_stages(judged.job, captured, plan, stages, judged.seed)
        kept = Clip.parse(plan.clip).by == "global"
        computed = plan if kept else replace(plan, clip="none")
        with torch.no_grad():
            trained = CapturedStepper(judged.job, captured, computed, stages, judged.seed, room)
            found = _held(judged, trained, room, plain)
    judgement = trained.judgement
    return found | {
        "exact": judgement.exact,
        "updates": judgement.updates,
        "gradients": len(judgement.gradients_seen),
        "tensors": judgement.compared,
        "operator": judgement.operator,
        "shifted": judgement.shifted,
        "notes": judgement.notes,
        "draws": draws,
        "counts": captured.graph.loss_counts,
        "buffers": len(trained.buffers()),
    }


def _held(judged: Judged, beside: CapturedStepper, room: SharedTensors, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The first difference, if there is one; what ``evaluate`` says, or what it is to be asked of elsewhere."""
    try:
        for parts, told in zip(_parts(judged, plainly=False), plain["updates"], strict=True):
            beside.update(parts, Update(**told))
        _same_averages(beside.averages(), room.take(plain["averages"]))
        if not judged.evaluates:
            return {"difference": "", "kind": ""}
        final = _final(judged, beside)
        if transport_named(judged.plan.transport).forks:
            room.go_on(plain["end"])
            return {"difference": "", "kind": "", "final": _left(final, room)}
        return _evaluation(judged, final, plain)
    except Difference as difference:
        return {"difference": difference.told + _where(judged.job.model, difference.told), "kind": difference.kind}


def _same_averages(own: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> None:
    for name, theirs in plain.items():
        if name in own and not same(own[name], theirs):
            raise Difference("optimizer", f"the moving average of parameter {name!r}")


def _final(judged: Judged, beside: CapturedStepper) -> Snapshot:
    """The state at the end, as a run hands it over to be evaluated."""
    header = MicroBatch(0, len(judged.batches) - 1, 0, 1, 1, 1, judged.batches[-1][1], 1, 1)
    return Snapshot(header, beside.weights(), beside.buffers(), beside.states())


def _left(final: Snapshot, room: SharedTensors) -> dict[str, Index]:
    found = averages(final.optimizer)
    return {
        "parameters": room.leave(final.parameters),
        "buffers": room.leave(final.buffers),
        "averages": room.leave(found),
    }


def evaluated_apart(
    judged: Judged, room: SharedTensors, found: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, Any]:
    """Evaluate in a process in which no stage was trained, as where a run's workers are processes."""
    left = {name: room.take(index) for name, index in found["final"].items()}
    header = MicroBatch(0, len(judged.batches) - 1, 0, 1, 1, 1, judged.batches[-1][1], 1, 1)
    states = {name: {EMA: average} for name, average in left["averages"].items()}
    with _quiet(judged):
        try:
            return _evaluation(judged, Snapshot(header, left["parameters"], left["buffers"], states), plain)
        except Difference as difference:
            return {"difference": difference.told, "kind": difference.kind}


def _evaluation(judged: Judged, final: Snapshot, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Compare what ``evaluate`` says of the captured job's weights in the person's model.

    Raises:
        Difference: it says other numbers than in plain PyTorch.
    """
    put(judged.captured, final)
    with holding_averages(judged.captured, final.optimizer):
        own = _evaluated(judged)
    nothing = {"difference": "", "kind": "", "evaluated": False}
    if "failed" in plain and "failed" in own:
        return nothing
    for side, other in ((own, "the captured job"), (plain, "plain PyTorch")):
        if "failed" in side:
            raise Difference("evaluate", f"evaluate fails beside {other} alone: {side['failed']}")
    ours, theirs = own["evaluated"], plain["evaluated"]
    for name in dict.fromkeys([*theirs, *ours]):
        if repr(ours.get(name)) != repr(theirs.get(name)):
            raise Difference(
                "evaluate", f"the number {name!r} of evaluate: {ours.get(name)} instead of {theirs.get(name)}"
            )
    return nothing | {"evaluated": True}


def _where(model: torch.nn.Module, told: str) -> str:
    """Where the person's code sets what a difference is of: a buffer or a parameter, if the source tells."""
    for kind in ("buffer", "parameter"):
        _, found, rest = told.partition(f"{kind} '")
        if not found:
            continue
        path, _, name = rest.partition("'")[0].rpartition(".")
        try:
            place = place_of(type(model.get_submodule(path)), name)
        except AttributeError:
            return ""
        return f" (set in {place})" if place else ""
    return ""
