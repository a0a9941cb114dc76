"""Compares the training of a captured job with the user's program in plain PyTorch: the first part of the proof.

A run is compared with its reference (:mod:`roundelay.proof.run_vs_reference`), but both compute with what capture has
made of the job: its graph, its loss, its optimizer stage by stage. Here these are compared with the user's program:
the user's objects train in the usual loop (:mod:`roundelay.proof.plain_stepper`), then the plan's stages do, one
micro-batch after the other (:mod:`roundelay.proof.captured_stepper`). Each runs in a forked child, so that the job's
own state stays as it was; a job that computes on a GPU is compared there, in this process
(:mod:`roundelay.proof.fidelity_in_process`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from roundelay.errors import NondeterministicError, RoundelayError, RunError, counted
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.ir.device_names import CPU
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.job import Job
from roundelay.launching.forked_call import isolated
from roundelay.lower.partition import partition
from roundelay.planning.planning import fitted, without_mesh
from roundelay.proof.fidelity_children import FidelityCase, evaluate_in_child, run_captured, run_plain
from roundelay.proof.fidelity_in_process import call_in_process, compared_on, must_share_process
from roundelay.proof.fidelity_on_mesh import differs_on_mesh
from roundelay.proof.shared_memory_tensors import SharedTensors
from roundelay.session.run_summary import UNCHECKED

Batches = Sequence[tuple[Batch, int]]
"""(batch, its epoch)."""

SIDES = 7
"""Most calls of which a comparison consists, each with a time limit of its own: on a mesh, and three sides twice."""

PLAIN, CAPTURED = "the training in plain PyTorch", "the training of the captured job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How the captured job compares with the user's program in plain PyTorch.

    Args:
        equal: no difference was found, beyond rounding.
        exact: all bits are the same.
        updates: number of compared updates.
        gradients: number of parameters whose gradients were compared.
        tensors: number of compared tensors, over all updates.
        parts: what was compared: losses, gradients, buffers, weights, results of ``evaluate``.
        difference: the first difference, with its subject, update and size; empty if there is none.
        kind: ``forward``, ``backward``, ``buffer``, ``optimizer``, ``evaluate`` or ``mesh``; empty if there is none.
        operator: if bits differ within rounding, the operation nearest the loss at which they do.
        notes: what was computed differently from a run, or was not compared.
        unchecked: why nothing could be compared; empty if it was.
        nondeterministic: an operation that gives other bits at each call on the device, so that a difference proves
            nothing; empty if there is none.
        mesh: the workers on which the model computes the same as on one, but for rounding; empty if there is one.
        seconds: time that the comparison took.
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
    nondeterministic: str = ""
    mesh: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.unchecked:
            return f"captured = plain PyTorch: {UNCHECKED} ({self.unchecked})"
        if not self.equal and self.nondeterministic:
            first = f"First difference: {self.difference}"
            return f"captured = plain PyTorch: cannot be compared: {self.nondeterministic}. {first}"
        if not self.equal:
            return f"captured DIFFERS from plain PyTorch: {self.difference}"
        how = "bit-equal" if self.exact else "equal but for rounding"
        if self.operator:
            how += f", from {self.operator} on"
        others = "".join(f", {part}" for part in self.parts if part not in ("losses", "gradients"))
        notes = "".join(f"; {note}" for note in self.notes)
        notes += f"; although {self.nondeterministic}" if self.nondeterministic else ""
        what = f"{counted(self.updates, 'update')}, {counted(self.gradients, 'gradient')}{others}"
        return f"captured = plain PyTorch ({what}: {how}{notes})"


def unchecked_reason(job: Job, plan: Plan) -> str:
    """Why a job cannot be compared with plain PyTorch in this process; empty if it can."""
    if job.weights is not None:
        return "the model's weights stay in their file, and no process holds all of them"
    return ""


def compare_with_plain(  # noqa: PLR0913  a comparison is of this many things
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
    """Train in plain PyTorch and by the plan's stages, an update for each batch, and compare the results.

    Args:
        job: the job; not changed.
        captured: its model.
        plan: what to run.
        seed: of the run.
        batches: to train on.
        evaluates: also compare the results of the job's ``evaluate`` at the end.
        limit_s: seconds that each side may take.
        stages: the plan's, if they are known.

    Raises:
        PlanError: the plan does not fit.
        NondeterministicError: an operation gives other bits at each call, and was asked not to.
        RunError: a side gave no answer within ``limit_s``, or was killed.
    """
    began = time.monotonic()
    if why := unchecked_reason(job, plan):
        return Fidelity(unchecked=why)
    if not batches:
        return Fidelity(unchecked="the loader gives no batch")
    if plan.mesh_size > 1 or plan.states:
        captured = captured.whole or captured
    device = compared_on(plan)
    in_process = device.type != CPU or must_share_process()
    mesh = plan.arrangement if plan.grid.size > 1 else ""
    if mesh:
        check = partial(differs_on_mesh, captured, plan, batches[0][0], seed)
        if difference := _called(check, "the model on its mesh", job, device, limit_s, in_process=in_process):
            return Fidelity(equal=False, exact=False, difference=difference, kind="mesh")
    if plan.mesh_size > 1 or plan.states:
        plan, stages = without_mesh(captured, plan), None
    evaluates = evaluates and job.evaluate is not None
    trained = tuple(batches)
    case = FidelityCase(job, captured, plan, seed, trained, evaluates, device=device, in_process=in_process)
    shared = _shared_memory(case)
    try:
        results = _compared(case, shared, fitted(captured, plan) if stages is None else stages, limit_s)
    finally:
        shared.close()
    return replace(results, mesh=mesh, seconds=time.monotonic() - began)


def _shared_memory(case: FidelityCase) -> SharedTensors:
    """Memory for plain PyTorch's tensors: gradients, weights and buffers of every update, and averages at the end."""
    model, updates = case.job.model, len(case.batches)
    weights, buffers = [*model.parameters()], [*model.buffers()]
    weight_bytes = sum(t.numel() * t.element_size() for t in weights)
    buffer_bytes = sum(t.numel() * t.element_size() for t in buffers)
    copies = 3 if case.plan.clip.by == "global" else 2
    tensors = (3 * updates + 6) * (len(weights) + len(buffers) + 64)
    return SharedTensors(
        (copies * updates + 5) * weight_bytes + (updates + 3) * (2 * buffer_bytes + (1 << 20)), tensors
    )


def _compared(case: FidelityCase, shared: SharedTensors, stages: Partition, limit_s: float) -> Fidelity:
    try:
        results = _both(case, shared, stages, limit_s)
        elsewhere = case.device.type != CPU and results["draws"]
        if results["difference"] and (results["shifted"] or elsewhere):
            note = "the forward draws numbers that nothing reads: compared with the same numbers at every draw"
            if elsewhere:
                note = "kernels of the device draw in orders of their own: compared with the same numbers at every draw"
            results = _with_note(_both(replace(case, same_draws=True), shared, stages, limit_s), note)
    except NondeterministicError:
        raise
    except RoundelayError as error:
        if type(error) is RunError:  # no answer: a comparison that was not made proves nothing
            raise
        return Fidelity(unchecked=f"{error.subject}: {error.got}")
    return _fidelity(case, results)


def _both(case: FidelityCase, shared: SharedTensors, stages: Partition, limit_s: float) -> dict[str, Any]:
    """Run plain PyTorch and then the captured job; returns the results of the comparison.

    Raises:
        RoundelayError: one of them failed, or did not finish in time.
    """

    def called(call: Callable[[], Any], what: str) -> dict[str, Any]:
        results: dict[str, Any] = _called(call, what, case.job, case.device, limit_s, in_process=case.in_process)
        return results

    plain = called(partial(run_plain, case, shared), PLAIN)
    results = called(partial(run_captured, case, shared, stages, plain), CAPTURED)
    is_cut = sum(len(spec.segments) for spec in stages.stages) > 1
    if results["difference"] and results["draws"] and not results["shifted"] and is_cut:
        graph = case.captured.graph
        whole = partition(graph, [(graph.ops[-1].name,)], ())
        again = called(partial(run_captured, case, shared, whole, plain), CAPTURED)
        if not again["difference"]:
            note = "random numbers next to a cut are drawn in another memory layout: compared without cuts"
            results = _with_note(again, note)
    if not results["difference"] and "final" in results:
        results |= called(partial(evaluate_in_child, case, shared, results, plain), CAPTURED)
    return results


def _called(
    call: Callable[[], Any], what: str, job: Job, device: torch.device, limit_s: float, *, in_process: bool
) -> Any:
    """Call one side: in a forked child, or in this process, where no time limit can end it."""
    if in_process:
        return call_in_process(call, what, job=job, device=device)
    return isolated(call, what, limit_s=limit_s)


def _with_note(results: dict[str, Any], note: str) -> dict[str, Any]:
    return results | {"notes": [*results["notes"], note]}


def _fidelity(case: FidelityCase, results: Mapping[str, Any]) -> Fidelity:
    """The results of the children as one value."""
    parts = ("losses", "gradients", "weights", *(["buffers"] if results["buffers"] else []))
    return Fidelity(
        equal=not results["difference"],
        exact=results["exact"] and not results["difference"],
        updates=results["updates"],
        gradients=results["gradients"],
        tensors=results["tensors"],
        parts=(*parts, *(["evaluate"] if results.get("evaluated") else [])),
        difference=results["difference"],
        kind=results["kind"],
        operator=results["operator"],
        notes=(*results["notes"], *_left_out(case.plan, results)),
    )


def _left_out(plan: Plan, results: Mapping[str, Any]) -> Iterator[str]:
    """Notes on what of a plan has no counterpart in plain PyTorch."""
    clip = plan.clip
    if clip.by in ("stage", "previous"):
        yield f"clipping by {clip.by} has no counterpart, and is not compared"
    if plan.compile and results["draws"]:
        yield "compiled stages draw by key, so they were compared without being compiled"
    if failed := results.get("evaluate_failed"):
        yield f"evaluate is not compared, as it fails on both sides: {failed}"
    if results["counts"]:
        yield "gradients of the loss's sum are divided by the number of terms"
