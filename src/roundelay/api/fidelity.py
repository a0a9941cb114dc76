"""Whether a captured job trains as the person's own program does in plain PyTorch: the first link of the proof.

A run is held to its reference (:mod:`roundelay.api.verifying`); but both compute with what capture has made of the job:
its graph, its loss, its optimizer stage by stage. Here these are held to the program that they were made of. The
person's own objects train in the loop that everybody writes (:mod:`roundelay.api.plain`), and then the plan's stages do,
one micro-batch after the other (:mod:`roundelay.api.beside`), each in a forked child of its own: what the person's code
changes ends with it, and training starts as if nobody had looked.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from typing import Any

import torch

from roundelay.api.beside import Beside
from roundelay.api.compiling import compile_stages, for_plan
from roundelay.api.differing import Difference, same
from roundelay.api.gathering import Snapshot
from roundelay.api.handover import Index, Room
from roundelay.api.keeping import averages, evaluate, holding_averages, put
from roundelay.api.plain import Part, Plain, Update, seed_of
from roundelay.api.planning import fitted
from roundelay.errors import RoundelayError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, num_rows, split, split_rows
from roundelay.frontend.reach import place_of
from roundelay.ir.averages import EMA
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.ir.words import counted
from roundelay.job import Job
from roundelay.lower.partition import partition
from roundelay.lower.refuse import CPU, FORKING
from roundelay.runtime.epoch import copied
from roundelay.runtime.isolated import isolated

Batches = Sequence[tuple[Batch, int]]
"""Batches, and the epoch of each."""

PLAIN, CAPTURED = "plain PyTorch beside the captured job", "the captured job beside plain PyTorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How the captured job compares with the person's own program in plain PyTorch.

    Args:
        equal: no difference was found, beyond rounding.
        exact: all bits are the same.
        updates: that were compared.
        gradients: parameters whose gradients were compared.
        tensors: how many tensors were compared, over all updates.
        parts: what was compared: losses, gradients, buffers, weights, numbers of ``evaluate``.
        difference: the first difference, with its subject, update and size; empty if there is none.
        kind: ``forward``, ``backward``, ``buffer``, ``optimizer`` or ``evaluate``; empty if there is no difference.
        operator: where bits differ within rounding, the operation nearest the loss from which on they do.
        notes: what was compared otherwise than a run does it, or not at all.
        unchecked: why nothing could be compared; empty if it was.
        seconds: that it took.
    """

    equal: bool = True
    exact: bool = True
    updates: int = 0
    gradients: int = 0
    tensors: int = 0
    parts: tuple[str, ...] = ()
    difference: str = ""
    kind: str = ""
    operator: str = ""
    notes: tuple[str, ...] = ()
    unchecked: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.unchecked:
            return f"captured = plain PyTorch: not checked ({self.unchecked})"
        if not self.equal:
            return f"captured DIFFERS from plain PyTorch: {self.difference}"
        how = "bit-equal" if self.exact else "equal but for rounding"
        if self.operator:
            how += f", from {self.operator} on"
        beside = "".join(f", {part}" for part in self.parts if part not in ("losses", "gradients"))
        notes = "".join(f"; {note}" for note in self.notes)
        what = f"{counted(self.updates, 'update')}, {counted(self.gradients, 'gradient')}{beside}"
        return f"captured = plain PyTorch ({what}: {how}{notes})"


def why_not(job: Job, plan: Plan) -> str:
    """Why a job cannot be compared with plain PyTorch in this process; empty if it can."""
    if job.weights is not None:
        return "the model's weights stay in their file, and no process holds all of them"
    if any(device != CPU for device in plan.devices):
        return "the plan computes on other devices than the CPU"
    if not hasattr(os, "fork"):
        return "processes cannot be forked here"
    return ""


def judge(  # noqa: PLR0913  a comparison is of this many things
    job: Job,
    captured: Captured,
    plan: Plan,
    seed: int,
    batches: Batches,
    *,
    evaluates: bool = False,
    limit_s: float,
    stages: Partition | None = None,
) -> Fidelity:
    """Train in plain PyTorch and by the plan's stages, an update for each batch, and compare all that comes of it.

    Args:
        job: the job; nothing of it is changed.
        captured: its model.
        plan: what to run.
        seed: of the run.
        batches: what to train on.
        evaluates: also compare what the job's ``evaluate`` says at the end.
        limit_s: seconds that each side may take.
        stages: the plan's, if they are known.

    Raises:
        PlanError: the plan does not fit.
    """
    began = time.monotonic()
    if why := why_not(job, plan):
        return Fidelity(unchecked=why)
    judged = _Judged(job, captured, plan, seed, tuple(batches), evaluates and job.evaluate is not None)
    room = _room(judged)
    try:
        found = _compared(judged, room, fitted(captured, plan) if stages is None else stages, limit_s)
    finally:
        room.close()
    return replace(found, seconds=time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What is compared, and on what."""

    job: Job
    captured: Captured
    plan: Plan
    seed: int
    batches: tuple[tuple[Batch, int], ...]
    evaluates: bool


def _room(judged: _Judged) -> Room:
    """Room for what plain PyTorch leaves: gradients, weights and buffers of every update, and averages at the end."""
    model, updates = judged.job.model, len(judged.batches)
    weights, buffers = [*model.parameters()], [*model.buffers()]
    held = sum(t.numel() * t.element_size() for t in weights)
    beside = sum(t.numel() * t.element_size() for t in buffers)
    copies = 3 if Clip.parse(judged.plan.clip).by == "global" else 2
    tensors = (3 * updates + 6) * (len(weights) + len(buffers) + 64)
    return Room((copies * updates + 5) * held + (updates + 3) * (2 * beside + (1 << 20)), tensors)


def _compared(judged: _Judged, room: Room, stages: Partition, limit_s: float) -> Fidelity:
    try:
        plain = isolated(partial(_plain, judged, room), PLAIN, limit_s=limit_s)
    except RoundelayError as error:
        return Fidelity(unchecked=f"{error.subject}: {error.got}")
    try:
        found = isolated(partial(_beside, judged, room, stages, plain), CAPTURED, limit_s=limit_s)
        whole = _uncut(judged.captured)
        if found["difference"] and found["draws"] and len(_segments(stages)) > 1:
            again = isolated(partial(_beside, judged, room, whole, plain), CAPTURED, limit_s=limit_s)
            if not again["difference"]:
                told = "what is drawn beside a cut is drawn in the order of memory there: compared without cuts"
                found = again | {"notes": [*again["notes"], told]}
        if not found["difference"] and judged.evaluates and "final" in found:
            found |= isolated(partial(_evaluated_apart, judged, room, found, plain), CAPTURED, limit_s=limit_s)
    except RoundelayError as error:
        return Fidelity(unchecked=f"{error.subject}: {error.got}")
    return _fidelity(judged, found)


def _fidelity(judged: _Judged, found: Mapping[str, Any]) -> Fidelity:
    """What the children have found."""
    if found["difference"] and found["shifted"]:
        return Fidelity(
            unchecked="the forward draws random numbers that the loss does not depend on, or in another order than the "
            f"captured job; so this may be of them: {found['difference']}"
        )
    parts = ["losses", "gradients", "weights", *(["buffers"] if found["buffers"] else [])]
    return Fidelity(
        equal=not found["difference"],
        exact=found["exact"] and not found["difference"],
        updates=found["updates"],
        gradients=found["gradients"],
        tensors=found["tensors"],
        parts=tuple([*parts, *(["evaluate"] if found.get("evaluated") else [])]),
        difference=found["difference"],
        kind=found["kind"],
        operator=found["operator"],
        notes=tuple([*found["notes"], *_left_out(judged.plan, found)]),
    )


def _left_out(plan: Plan, found: Mapping[str, Any]) -> Iterator[str]:
    """What of a plan has no counterpart in plain PyTorch."""
    clip = Clip.parse(plan.clip)
    if clip.by in ("stage", "previous"):
        yield f"clipping by {clip.by} has no counterpart, and is not compared"
    if plan.compile and found["draws"]:
        yield "compiled stages draw by key, so they were compared without being compiled"
    if found["counts"]:
        yield "gradients of the loss's sum are divided by the number of terms"


def _segments(stages: Partition) -> list[Any]:
    return [segment for spec in stages.stages for segment in spec.segments]


def _uncut(captured: Captured) -> Partition:
    """The whole model as one stage."""
    return partition(captured.graph, [(captured.graph.ops[-1].name,)], ())


def _parts(judged: _Judged, *, plainly: bool) -> Iterator[list[Part]]:
    """The micro-batches of every batch; for plain PyTorch a batch that is not cut stays as the loader gave it."""
    g = 0
    for t, (batch, epoch) in enumerate(judged.batches):
        rows = num_rows(batch)
        sizes = split_rows(rows, judged.plan.micro_batches)
        own = copied(batch)
        # parts in memory of their own: a kernel may tell a view that begins elsewhere, and round otherwise
        cut = [own] if plainly and len(sizes) == 1 else [copied(part) for part in split(own, len(sizes))]
        made = []
        for i, (size, part) in enumerate(zip(sizes, cut, strict=True)):
            made.append((MicroBatch(g, t, i, len(sizes), size, rows, epoch, 0, 0), part))
            g += 1
        yield made


@contextmanager
def _quiet() -> Iterator[None]:
    """What the person's code prints, and warns of, it does so again when it is trained."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ------------------------------------------------------------------------------------------- in children of their own


def _plain(judged: _Judged, room: Room) -> dict[str, Any]:
    """What plain PyTorch does."""
    with _quiet():
        plain = Plain(judged.job, judged.plan, judged.seed, room)
        made = [asdict(plain.update(parts)) for parts in _parts(judged, plainly=True)]
        found: dict[str, Any] = {"updates": made, "averages": room.leave(plain.averages)}
        if not judged.evaluates:
            return found
        if plain.switches:
            plain.optimizer.eval()  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, parameter in plain.named:
                parameter.data = plain.averages.get(name, parameter.data)
        return found | _evaluated(judged)


def _evaluated(judged: _Judged) -> dict[str, Any]:
    """What ``evaluate`` says of the model as it stands, or why it says nothing."""
    torch.manual_seed(seed_of(judged.seed, len(judged.batches)))
    try:
        found, _ = evaluate(judged.job, judged.captured.model, len(judged.batches), judged.batches[-1][1])
    except RoundelayError as error:
        return {"failed": error.got}
    return {"evaluated": found.metrics}


def _beside(judged: _Judged, room: Room, stages: Partition, plain: Mapping[str, Any]) -> dict[str, Any]:
    """What the captured job does, compared with it."""
    plan, captured = judged.plan, for_plan(judged.captured, judged.plan)
    draws = any(op.draws >= 0 for op in captured.graph.ops)
    with _quiet():
        if plan.compile and draws:
            captured = captured.compiling(None)
        elif plan.compile:
            compile_stages(judged.job, captured, plan, stages, judged.seed)
        kept = Clip.parse(plan.clip).by == "global"
        computed = plan if kept else replace(plan, clip="none")
        with torch.no_grad():
            beside = Beside(judged.job, captured, computed, stages, judged.seed, room)
            found = _held(judged, beside, room, plain)
    judgement = beside.judgement
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
        "buffers": len(beside.buffers()),
    }


def _held(judged: _Judged, beside: Beside, room: Room, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The first difference, if there is one; what ``evaluate`` says, or what it is to be asked of elsewhere."""
    try:
        for parts, told in zip(_parts(judged, plainly=False), plain["updates"], strict=True):
            beside.update(parts, Update(**told))
        _same_averages(beside.averages(), room.take(plain["averages"]))
        if not judged.evaluates:
            return {"difference": "", "kind": ""}
        final = _final(judged, beside)
        if judged.plan.transport in FORKING:
            return {"difference": "", "kind": "", "final": _left(final, room)}
        return _evaluation(judged, final, plain)
    except Difference as difference:
        return {"difference": difference.told + _where(judged.job.model, difference.told), "kind": difference.kind}


def _same_averages(own: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> None:
    for name, theirs in plain.items():
        if name in own and not same(own[name], theirs):
            raise Difference("optimizer", f"the moving average of parameter {name!r}")


def _final(judged: _Judged, beside: Beside) -> Snapshot:
    """The state at the end, as a run hands it over to be evaluated."""
    header = MicroBatch(0, len(judged.batches) - 1, 0, 1, 1, 1, judged.batches[-1][1], 1, 1)
    states = {n: {key: v for key, v in state.items()} for n, state in beside.states().items()}
    return Snapshot(header, beside.weights(), beside.buffers(), states)


def _left(final: Snapshot, room: Room) -> dict[str, Index]:
    found = averages(final.optimizer)
    return {
        "parameters": room.leave(final.parameters),
        "buffers": room.leave(final.buffers),
        "averages": room.leave(found),
    }


def _evaluated_apart(judged: _Judged, room: Room, found: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate in a process in which no stage was trained, as where a run's workers are processes."""
    left = {name: room.take(index) for name, index in found["final"].items()}
    header = MicroBatch(0, len(judged.batches) - 1, 0, 1, 1, 1, judged.batches[-1][1], 1, 1)
    states = {name: {EMA: average} for name, average in left["averages"].items()}
    with _quiet():
        try:
            return _evaluation(judged, Snapshot(header, left["parameters"], left["buffers"], states), plain)
        except Difference as difference:
            return {"difference": difference.told, "kind": difference.kind}


def _evaluation(judged: _Judged, final: Snapshot, plain: Mapping[str, Any]) -> dict[str, Any]:
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
        before, found, rest = told.partition(f"{kind} '")
        if not found:
            continue
        path, _, name = rest.partition("'")[0].rpartition(".")
        try:
            place = place_of(type(model.get_submodule(path)), name)
        except AttributeError:
            return ""
        return f" (set in {place})" if place else ""
    return ""
