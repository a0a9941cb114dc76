"""Make global tensors: with the same numbers, however many processes they lie on and whatever their signature is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundelay.errors import PlanError
from roundelay.global_tensor.operators import LocalTensor
from roundelay.global_tensor.placement import Placement
from roundelay.global_tensor.tensor import GlobalTensor, check_signature
from roundelay.global_tensor.transfer import boxed
from roundelay.ir.sbp import B, Signature, local_shape


def tensor(whole: torch.Tensor, *, placement: Placement, sbp: Signature = B) -> GlobalTensor:
    """A global tensor of which every process of the placement has all beforehand; on others the numbers do not matter.

    Raises:
        PlanError: the signature does not fit the shape.
    """
    check_signature(whole.shape, sbp, placement)
    inside = placement.position is not None
    local = (
        boxed(whole.detach().resolve_conj().resolve_neg(), whole.shape, B, sbp, placement).clone()
        if inside
        else whole.new_empty(0)
    )
    return GlobalTensor(LocalTensor(local, tuple(whole.shape), placement, sbp))


def from_local(local: torch.Tensor, shape: tuple[int, ...], *, placement: Placement, sbp: Signature) -> GlobalTensor:
    """A global tensor of this shape of what each process has of it, whose memory it shares.

    Raises:
        PlanError: the signature does not fit the shape, or what this process has is not its part.
    """
    check_signature(shape, sbp, placement)
    if (position := placement.position) is not None:
        expected = local_shape(shape, sbp, placement.size, position)
        if tuple(local.shape) != expected:
            raise PlanError(
                f"a global tensor of shape {shape}, {sbp} on {placement}",
                got=f"{tuple(local.shape)} on rank {placement.ranks[position]}",
                expected=f"{expected}: its part",
                remedy="Give each process its part, or all of it to roundelay.tensor.",
            )
    return GlobalTensor(LocalTensor(local.detach().resolve_conj().resolve_neg(), shape, placement, sbp))


def _made(make: Callable[..., torch.Tensor], name: str) -> Callable[..., GlobalTensor]:
    def factory(
        *size: int, placement: Placement, sbp: Signature = B, requires_grad: bool = False, **options: Any
    ) -> GlobalTensor:
        made = tensor(make(*size, **options), placement=placement, sbp=sbp)
        made.requires_grad_(requires_grad)
        return made

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"""``torch.{name}`` of these sizes on a placement.

    Options are torch's. Random numbers are those of the whole, of torch's generator: seed it alike on every process.
    """
    return factory


randn, rand, zeros, ones = (_made(getattr(torch, name), name) for name in ("randn", "rand", "zeros", "ones"))
