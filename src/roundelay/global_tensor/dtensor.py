"""Global tensors as torch's ``DTensor`` and back, over one axis; local parts are shared, nothing is sent.

Gradients flow through both, and lie as those of global tensors do: of what is split they are split, of all else whole.

torch cuts a dimension into chunks of ceil(size / parts), of which the last ones may be shorter or empty; ours differ by
one at most. Where these are not the same parts, the conversion is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import Placement as TheirPlacement

from roundelay.errors import PlanError
from roundelay.global_tensor.factories import from_local
from roundelay.global_tensor.placement import Placement, placement
from roundelay.global_tensor.tensor import GlobalTensor, gradient_of, moved
from roundelay.ir.sbp import B, P, Signature, Split, bounds


def to_dtensor(x: GlobalTensor) -> DTensor:
    """The same tensor for torch. Every process of the default group calls it, as it makes a group for the mesh.

    Raises:
        PlanError: DTensor has no such parts.
    """
    mesh = DeviceMesh(x.device.type, list(x.placement.ranks))
    made: DTensor = _ToDTensor.apply(x, mesh)  # type: ignore[no-untyped-call]
    return made


def _as_dtensor(x: GlobalTensor, mesh: DeviceMesh) -> DTensor:
    own = x.sbp
    if isinstance(own, Split):
        _check_parts(tuple(x.shape), own, x.placement.size)
    theirs: TheirPlacement = Shard(own.dim) if isinstance(own, Split) else Replicate() if own == B else Partial()
    local = x.to_local().detach()
    return DTensor.from_local(local, mesh, [theirs], run_check=False, shape=x.shape, stride=_strides(x.shape))


def from_dtensor(x: DTensor) -> GlobalTensor:
    """The same tensor for us.

    Raises:
        PlanError: it lies on a mesh of several axes, or in other parts than ours.
    """
    if x.device_mesh.ndim != 1:
        raise PlanError(
            "a DTensor",
            got=f"a mesh of {x.device_mesh.ndim} axes",
            expected="one axis",
            remedy="Redistribute it to a mesh of one axis.",
        )
    on = placement([int(rank) for rank in x.device_mesh.mesh])
    made: GlobalTensor = _FromDTensor.apply(x, on)  # type: ignore[no-untyped-call]
    return made


class _ToDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, mesh: DeviceMesh) -> DTensor:
        ctx.before = x.placement, gradient_of(x.sbp)
        return _as_dtensor(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[GlobalTensor, None]:
        on, signature = ctx.before
        return moved(_as_global(grads[0], on), on, signature), None


class _FromDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, on: Placement) -> GlobalTensor:
        made = _as_global(x, on)
        ctx.mesh, ctx.before = x.device_mesh, (on, gradient_of(made.sbp))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: GlobalTensor) -> tuple[DTensor, None]:
        return _as_dtensor(moved(grads[0], *ctx.before), ctx.mesh), None


def _as_global(x: DTensor, on: Placement) -> GlobalTensor:
    (theirs,) = x.placements
    own: Signature = B
    if isinstance(theirs, Shard):
        own = Split(theirs.dim)
        _check_parts(tuple(x.shape), own, on.size)
    elif isinstance(theirs, Partial):
        if theirs.reduce_op != "sum":
            raise PlanError("a DTensor", got=str(theirs), expected="a partial sum", remedy="Redistribute it before.")
        own = P
    return from_local(x.to_local().detach(), tuple(x.shape), placement=on, sbp=own)


def _check_parts(shape: tuple[int, ...], split: Split, parts: int) -> None:
    ours = [end - start for start, end in bounds(split.count(shape[split.dim]), parts)]
    theirs = [len(chunk) for chunk in torch.arange(shape[split.dim]).chunk(parts)]
    if split.outer * split.unit > 1 or ours != theirs:
        raise PlanError(
            f"a tensor of shape {shape}, {split} over {parts}",
            got=f"parts of {ours} here, and of {theirs} in DTensor",
            expected="the same parts: a size that can be divided by their number",
            remedy="Call to_global(sbp=sbp.broadcast) before, or redistribute to Replicate().",
        )


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
