"""Boxings within a stage: a value, or its gradient, as its exchange takes it, and as it is afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roundelay.ir.exchange import Phase, all_gather, all_reduce, all_to_all, reduce_scatter
from roundelay.ir.sbp import Partial, Signature, Split
from roundelay.runtime.exchange import Parts


def phases_of(source: Signature, target: Signature) -> tuple[Phase, ...]:
    """How a signature becomes another that no worker makes alone (OneFlow, Table 2); empty if there is no way yet."""
    put, join = _place(target, source), _place(source, target)
    if isinstance(source, Partial):
        return all_reduce(op=source.op) if put is None else reduce_scatter(put, source.op)
    if put is None or join is None:
        return () if join is None else all_gather(join)
    return all_to_all(join, put) if put != join else ()


def _place(own: Signature, other: Signature) -> int | None:
    """The dimension of an exchanged tensor in which a signature splits it; None if it does not."""
    if not isinstance(own, Split):
        return None
    return 3 if isinstance(other, Split) and other.dim < own.dim else 1


def exchanged_shape(shape: Sequence[int], source: Signature, target: Signature) -> tuple[int, ...]:
    """The shape in which a tensor is exchanged: flat, or what its splits divide between what stays together."""
    by_dim = {own.dim: own for own in (source, target) if isinstance(own, Split)}
    exchanged = [1]
    for dim, size in enumerate(shape):
        split = by_dim.get(dim)
        if split is None:
            exchanged[-1] *= size
        else:
            exchanged[-1] *= split.outer
            exchanged += [split.count(size), split.unit]
    return tuple(exchanged)


@dataclass(frozen=True, slots=True)
class Boxing:
    """One boxing as a worker carries it out.

    Args:
        name: of the boxed value.
        forward: whether the value is boxed, or its gradient.
        source: signature of what the worker has.
        target: signature of what it gets.
    """

    name: str
    forward: bool
    source: Signature
    target: Signature

    def packed(self, value: torch.Tensor) -> Parts:
        """What the worker gives."""
        return (value.reshape(exchanged_shape(value.shape, self.source, self.target)),)

    def unpacked(self, parts: Parts, given: Sequence[int]) -> torch.Tensor:
        """The boxed tensor, of what came and the shape of what was given."""
        (part,) = parts
        shape = list(given)
        for split, other in ((self.source, self.target), (self.target, self.source)):
            place = _place(split, other)
            if isinstance(split, Split) and place is not None:
                shape[split.dim] = split.outer * part.shape[place] * split.unit
        return part.view(shape)
