"""A tensor of which every process of a placement has a part, all, or an addend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils._pytree import tree_map

from roundelay.errors import PlanError
from roundelay.global_tensor.operators import LocalTensor, compute, in_backward
from roundelay.global_tensor.placement import Placement
from roundelay.global_tensor.transfer import boxed, moved_to
from roundelay.ir.sbp import P_MAX, B, Broadcast, Partial, Signature, Split


@final
class GlobalTensor(torch.Tensor):
    """A tensor with a placement and a signature; torch's operators and autograd work on it.

    Operators are computed by the cheapest legal row of the rules for signatures, on what each process has; a partial
    sum is kept as long as it can be. A process outside of the placement has nothing of it, and computes nothing.
    """

    _laid: LocalTensor

    @staticmethod
    def __new__(cls, laid: LocalTensor) -> GlobalTensor:
        """Made by the functions of :mod:`roundelay.global_tensor.factories`, by operators, and by ``to_global``."""
        made: GlobalTensor = torch.Tensor._make_wrapper_subclass(
            cls, laid.shape, dtype=laid.local.dtype, device=laid.local.device
        )
        made._laid = laid
        return made

    @property
    def placement(self) -> Placement:
        """The processes on which it lies."""
        return self._laid.placement

    @property
    def sbp(self) -> Signature:
        """How it lies there."""
        return self._laid.signature

    def __repr__(self) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"GlobalTensor(shape={tuple(self.shape)}, {self.dtype}, {self.sbp} on {self.placement}{grad})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch.

        Raises:
            PlanError: it reads numbers, which no process has as a whole.
        """
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if "data is not allocated yet" not in str(error):
                    raise
                raise PlanError(
                    f"{getattr(func, '__name__', func)} on global tensors",
                    got="a function that reads numbers of a tensor",
                    expected="one that makes tensors of tensors",
                    remedy="Give it x.full(), which every process has.",
                ) from error

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute an operator."""
        with _seeing_conjugates():
            return cls._computed(func, args, kwargs)

    @classmethod
    def _computed(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.add_.Tensor and in_backward() and not kwargs:
            return _accumulated(*args)
        given = tree_map(lambda x: x._laid if isinstance(x, GlobalTensor) else x, (tuple(args), dict(kwargs or {})))
        return tree_map(lambda x: GlobalTensor(x) if isinstance(x, LocalTensor) else x, compute(func, *given))

    def to_global(self, *, placement: Placement | None = None, sbp: Signature | None = None) -> GlobalTensor:
        """The same tensor on other processes, or with another signature there. Every process calls it.

        Raises:
            PlanError: the signature does not fit the shape.
        """
        target, signature = placement or self.placement, self.sbp if sbp is None else sbp
        check_signature(self.shape, signature, target)
        result: GlobalTensor = _ToGlobal.apply(self, target, signature)  # type: ignore[no-untyped-call]
        return result

    def to_local(self) -> torch.Tensor:
        """What this process has of it; empty outside of the placement. Its gradient does not flow back."""
        return self._laid.local

    def full(self) -> torch.Tensor:
        """All of it, on every process of the placement; empty on others. Every process of the placement calls it."""
        own = self._laid
        return boxed(own.local, own.shape, own.signature, B, own.placement)


@contextmanager
def _seeing_conjugates() -> Iterator[None]:
    """Within the block tensors are conjugated and negated where they are marked so: torch has turned that off here."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.Conjugate, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.Negative, False),
    ):
        yield


def _accumulated(total: GlobalTensor, gradient: GlobalTensor) -> GlobalTensor:
    """A leaf's gradient to which autograd adds another."""
    total._laid = moved(torch.add(total, gradient), total.placement, total.sbp)._laid  # type: ignore[arg-type]
    return total


class _ToGlobal(torch.autograd.Function):
    """The gradient of what is split is split, and of all else broadcast, where the tensor was before."""

    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, target: Placement, signature: Signature) -> GlobalTensor:
        ctx.before = x.placement, gradient_of(x.sbp)
        return moved(x, target, signature)

    @staticmethod
    def backward(ctx: Any, *grads: GlobalTensor) -> tuple[GlobalTensor, None, None]:
        return moved(grads[0], *ctx.before), None, None


def gradient_of(signature: Signature) -> Signature:
    """How the gradient of a tensor lies that lies so."""
    return signature if isinstance(signature, Split) else B


def moved(x: GlobalTensor, target: Placement, signature: Signature) -> GlobalTensor:
    """The tensor elsewhere, or otherwise."""
    own = x._laid
    local = moved_to(own.local, own.shape, (own.placement, own.signature), (target, signature))
    return GlobalTensor(LocalTensor(local, own.shape, target, signature))


def check_signature(shape: Sequence[int], signature: Signature, on: Placement) -> None:
    """Refuse a signature that does not fit.

    Raises:
        PlanError: it is none, or splits a dimension that there is not.
    """
    fits = isinstance(signature, (Broadcast, Partial)) and signature != P_MAX
    if isinstance(signature, Split):
        fits = 0 <= signature.dim < len(shape) and signature.fits(shape[signature.dim])
    if not fits:
        raise PlanError(
            f"a global tensor of shape {tuple(shape)} on {on}",
            got=str(signature),
            expected="broadcast, partial_sum, or a split of one of its dimensions",
            remedy="Correct sbp.",
        )
