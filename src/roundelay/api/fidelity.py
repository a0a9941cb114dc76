"""Whether a captured job trains as the person's own program does in plain PyTorch: the first link of the proof.

A run is held to its reference (:mod:`roundelay.api.verifying`); but both compute with what capture has made of the job:
its graph, its loss, its optimizer stage by stage. Here these are held to the program that they were made of. The
person's own objects train in the loop that everybody writes (:mod:`roundelay.api.plain_stepper`), and then the plan's
stages do, one micro-batch after the other (:mod:`roundelay.api.captured_stepper`), each in a forked child of its own:
what the person's code changes ends with it, and training starts as if nobody had looked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from roundelay.api.fidelity_children import Judged, beside, evaluated_apart, plainly
from roundelay.api.planning import fitted
from roundelay.api.shared_tensors import SharedTensors
from roundelay.errors import RoundelayError, counted
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.ir.clip import Clip
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.job import Job
from roundelay.lower.partition import partition
from roundelay.lower.validate_plan import CPU
from roundelay.runtime.forked_call import isolated

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
    if not batches:
        return Fidelity(unchecked="the loader gives no batch")
    judged = Judged(job, captured, plan, seed, tuple(batches), evaluates and job.evaluate is not None)
    room = _room(judged)
    try:
        found = _compared(judged, room, fitted(captured, plan) if stages is None else stages, limit_s)
    finally:
        room.close()
    return replace(found, seconds=time.monotonic() - began)


def _room(judged: Judged) -> SharedTensors:
    """Room for what plain PyTorch leaves: gradients, weights and buffers of every update, and averages at the end."""
    model, updates = judged.job.model, len(judged.batches)
    weights, buffers = [*model.parameters()], [*model.buffers()]
    held = sum(t.numel() * t.element_size() for t in weights)
    besides = sum(t.numel() * t.element_size() for t in buffers)
    copies = 3 if Clip.parse(judged.plan.clip).by == "global" else 2
    tensors = (3 * updates + 6) * (len(weights) + len(buffers) + 64)
    return SharedTensors((copies * updates + 5) * held + (updates + 3) * (2 * besides + (1 << 20)), tensors)


def _compared(judged: Judged, room: SharedTensors, stages: Partition, limit_s: float) -> Fidelity:
    try:
        found = _both(judged, room, stages, limit_s)
        if found["difference"] and found["shifted"]:
            told = "the forward draws numbers that nothing reads: compared with the same numbers at every draw"
            found = _noted(_both(replace(judged, same_draws=True), room, stages, limit_s), told)
    except RoundelayError as error:
        return Fidelity(unchecked=f"{error.subject}: {error.got}")
    return _fidelity(judged, found)


def _both(judged: Judged, room: SharedTensors, stages: Partition, limit_s: float) -> dict[str, Any]:
    """What both sides, one after the other, have found.

    Raises:
        RoundelayError: one of them failed, or told nothing in time.
    """
    plain = isolated(partial(plainly, judged, room), PLAIN, limit_s=limit_s)
    found: dict[str, Any] = isolated(partial(beside, judged, room, stages, plain), CAPTURED, limit_s=limit_s)
    if found["difference"] and found["draws"] and not found["shifted"] and _cuts(stages):
        whole = _uncut(judged.captured)
        again = isolated(partial(beside, judged, room, whole, plain), CAPTURED, limit_s=limit_s)
        if not again["difference"]:
            told = "what is drawn beside a cut is drawn in another order of memory there: compared without cuts"
            found = _noted(again, told)
    if not found["difference"] and "final" in found:
        found |= isolated(partial(evaluated_apart, judged, room, found, plain), CAPTURED, limit_s=limit_s)
    return found


def _noted(found: dict[str, Any], told: str) -> dict[str, Any]:
    return found | {"notes": [*found["notes"], told]}


def _fidelity(judged: Judged, found: Mapping[str, Any]) -> Fidelity:
    """What the children have found."""
    parts = ("losses", "gradients", "weights", *(["buffers"] if found["buffers"] else []))
    return Fidelity(
        equal=not found["difference"],
        exact=found["exact"] and not found["difference"],
        updates=found["updates"],
        gradients=found["gradients"],
        tensors=found["tensors"],
        parts=(*parts, *(["evaluate"] if found.get("evaluated") else [])),
        difference=found["difference"],
        kind=found["kind"],
        operator=found["operator"],
        notes=(*found["notes"], *_left_out(judged.plan, found)),
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


def _cuts(stages: Partition) -> int:
    return sum(len(spec.segments) for spec in stages.stages) - 1


def _uncut(captured: Captured) -> Partition:
    """The whole model as one stage."""
    return partition(captured.graph, [(captured.graph.ops[-1].name,)], ())
