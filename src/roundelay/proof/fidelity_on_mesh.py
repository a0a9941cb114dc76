"""Compares a model on a plan's mesh, replicas included, with the same model without: losses, gradients, buffers.

Both sides compute the first micro-batches of a batch by the reference's own functions: on one side dealt to replicas,
in parts, with what these exchange; on the other one after the other. So this ties the reference, which a run must equal
bit for bit, to what one worker computes.

Parts of sums are added in another order on a mesh, so the last bits differ. What is compared is whether each gradient
is the same up to rounding: :data:`RELATIVE` of its own size, and of the size of all gradients where that is larger than
its own, as a gradient that cancels out (that of an attention's key bias) is nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from roundelay.frontend import Captured, RngKey
from roundelay.frontend.batch import Batch, num_rows, part_rows, split
from roundelay.frontend.stages.precision import FULL
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.ir.graph import LOSS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.stage import StageSpec
from roundelay.lower.boxed_graph import segment_ends
from roundelay.lower.partition import partition
from roundelay.planning.compile_stages import for_plan
from roundelay.planning.on_mesh import on_mesh
from roundelay.reference import ReferenceStage
from roundelay.reference.mesh import Each, backward, forward, local
from roundelay.reference.replica import Replica, add_made, total_gradients

RELATIVE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 2e-4, torch.complex64: 2e-4}
"""Largest relative difference of what is computed in full precision, by dtype; :data:`COARSE` for all else. Norms of
double models may compute in float32."""

COARSE = 0.05
"""The same where the plan computes in low precision."""

NOISE, MOST = 1.0, 0.2
"""Where the model itself does, its rounding is measured: of each value this multiple of how far it moves if weights
change by one rounding, and at most so much: a T5 in bfloat16 is as far from itself in float32 as 0.1."""

ROUNDS = 2
"""Micro-batches of each replica that are compared: sums over micro-batches and over replicas are of two or more."""

OF_ALL = 1e-3
"""The share of the size of all gradients below which a gradient's own size does not count."""

Tensors = dict[str, torch.Tensor]


def differs_on_mesh(captured: Captured, plan: Plan, batch: Batch, seed: int) -> str:
    """The first difference between the model on a plan's mesh and without it, in words; empty if there is none.

    Args:
        captured: the model, on no mesh.
        plan: has the mesh, the replicas, the precision and the micro-batches.
        batch: of which the first micro-batches are taken, :data:`ROUNDS` for each replica.
        seed: of the run, for random numbers.
    """
    whole = for_plan(captured, replace(plan, mesh={}, parameters={}, outputs={}, states={}, compile=False))
    rounds = _rounds(whole, plan, batch)
    in_turn = [[entry] for dealt in rounds for entry in dealt]
    theirs = _computed(whole, in_turn, seed, plan)
    ours = _computed(on_mesh(whole, plan), rounds, seed, plan)
    epsilon = _epsilon(captured)
    moved = _computed(whole, in_turn, seed, plan, epsilon) if epsilon else theirs
    near = RELATIVE if plan.precision == FULL else {}
    least = OF_ALL * sum(_norm(gradient) ** 2 for gradient in theirs[1].values()) ** 0.5
    for what, *of_each in zip(("loss", "gradient of", "buffer"), ours, theirs, moved, strict=True):
        for name in sorted({*of_each[0], *of_each[1]}):
            a, b, c = (found.get(name) for found in of_each)
            at_least = least if what == "gradient of" else 0.0
            if found := _differs(a, b, c, at_least, COARSE if a is None else near.get(a.dtype, COARSE)):
                subject = f"the {what} {name!r}" if name != LOSS else "the loss"
                return f"{subject} on the mesh is not what it is without: {found}"
    return ""


def _epsilon(captured: Captured) -> float:
    """The rounding of the lowest precision in which the model itself computes; 0 if in none that is low."""
    own = captured.graph
    kinds = {value.dtype for value in own.values.values()} | {weight.dtype for weight in own.parameters.values()}
    return max((torch.finfo(getattr(torch, kind)).eps for kind in kinds & {"bfloat16", "float16"}), default=0.0)


def _differs(
    own: torch.Tensor | None, other: torch.Tensor | None, moved: torch.Tensor | None, least: float, allowed: float
) -> str:
    if own is None or other is None or moved is None:
        return "there is none" if own is None else "there is one"
    if own.shape != other.shape:
        return f"its shape is {tuple(own.shape)}, not {tuple(other.shape)}"
    if not (own.is_floating_point() or own.is_complex()):
        return "" if torch.equal(own, other) else "another value"
    far, noise = (_distance(one, other, least) for one in (own, moved))
    return "" if far <= max(allowed, min(MOST, NOISE * noise)) else f"it differs by {far:.2g} of its size"


def _distance(one: torch.Tensor, other: torch.Tensor, least: float) -> float:
    return _norm(one.to(torch.complex128) - other.to(torch.complex128)) / (max(_norm(other), least) or 1.0)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.abs().double().norm())


def _rounds(captured: Captured, plan: Plan, batch: Batch) -> list[list[tuple[MicroBatch, Tensors]]]:
    """The first micro-batches of a batch as they are dealt, one to each replica at a time."""
    size, least = plan.replicas, captured.graph.min_rows
    sizes, parts = (of(batch, plan.batch_parts, least) for of in (part_rows, split))
    count, rows = -(-len(parts) // size), num_rows(batch)
    entries = [
        (MicroBatch(n // size, 0, n // size, count, own, rows, 0, 1, 1, replica=n % size, replicas=size), part)
        for n, (own, part) in enumerate(zip(sizes, parts, strict=True))
    ]
    some = [(header, captured.values(part)) for header, part in entries[: ROUNDS * size]]
    return [some[first : first + size] for first in range(0, len(some), size)]


def _computed(
    captured: Captured,
    rounds: Sequence[Sequence[tuple[MicroBatch, Tensors]]],
    seed: int,
    plan: Plan,
    epsilon: float = 0.0,
) -> tuple[Tensors, Tensors, Tensors]:
    """Losses, gradients and each replica's buffers, without cuts between stages; with weights moved by so much."""
    last = captured.graph.ops[-1].name
    ends = segment_ends(captured.graph, [[last]], captured.boxes) if captured.boxes else [[last]]
    (spec,) = partition(captured.graph, ends).stages
    stage = reference_stage(captured, spec, plan.mesh_size if captured.sharding is not None else 1)
    workers = range(len(stage.functions))
    named = {n: _moved(p.detach(), epsilon) for n, p in captured.parameters().items() if n in spec.parameters}
    weights = [local(stage, named, worker) for worker in workers]
    own, size = captured.buffers(), len(rounds[0])
    replicas = [Replica(r, {}, len(workers)) for r in range(size)]
    held = {header.replica: {n: own[n] for n in spec.buffers} for dealt in rounds for header, _ in dealt}
    losses: list[torch.Tensor] = []
    shards = plan.shards if size > 1 and plan.shards else size
    for dealt in rounds:
        for replica, (header, values) in zip(replicas, dealt, strict=False):
            buffers = [{n: b.clone() for n, b in held[header.replica].items()} for _ in workers]
            each: Each = [dict(values) for _ in workers]
            tapes = forward(stage, weights, buffers, each, RngKey(seed, header.number), "stash")
            held[header.replica] = buffers[0]
            losses.append(each[0][LOSS].detach())
            gradients: Each = [{LOSS: torch.full_like(each[0][LOSS], header.weight)} for _ in workers]
            replica.add(backward(stage, weights, tapes, gradients), stage.made)
        for first in range(0, size, shards):
            add_made(replicas[first : first + shards])
    total = total_gradients(replicas, [stage], rounds[-1][-1][0].end, shards)
    buffers_of = {f"{n} of replica {r}" if r else n: b for r, of in held.items() for n, b in of.items()}
    return {LOSS: torch.stack(losses)}, total, buffers_of


def _moved(weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """A weight with each element larger or smaller by that share of it, by turns."""
    if not epsilon:
        return weight
    signs = torch.ones(weight.numel(), dtype=weight.dtype)
    signs[::2] = -1
    return weight + epsilon * weight * signs.reshape(weight.shape)


def reference_stage(captured: Captured, spec: StageSpec, workers: int, device: torch.device = CPU) -> ReferenceStage:
    """A stage as the reference runs it, on every worker of the mesh."""
    functions = [captured.stage(spec, device, part=part) for part in range(workers)]
    sharding: Any = captured.sharding
    states = {name: split for name, split in captured.states.items() if name in spec.parameters}
    made = frozenset(name for name in states if captured.residences[name].sums_parts)
    if sharding is None:
        return ReferenceStage(functions, spec.parameters, spec.buffers, device, states=states, made=made)
    return ReferenceStage(
        functions,
        spec.parameters,
        spec.buffers,
        device,
        {name: sharding.parameters[name] for name in spec.parameters if name in sharding.parameters},
        frozenset(name for name in spec.parameters if captured.has_partial_gradient(name)),
        sharding.boxes,
        states,
        made,
    )
