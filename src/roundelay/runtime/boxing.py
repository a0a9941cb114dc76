"""Boxings within a stage: a value, or its gradient, as its exchange takes it, and as it is afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roundelay.ir.exchange import Phase, all_gather, all_reduce, reduce_scatter
from roundelay.ir.sbp import Partial, Signature, Split
from roundelay.runtime.exchange import Parts

BLOCKS = 1
"""The dimension of an exchanged tensor along which it is split: what is before and behind it stays together."""


def phases_of(source: Signature, target: Signature) -> tuple[Phase, ...]:
    """How a signature becomes another that no worker makes alone (OneFlow, Table 2); empty if there is no way yet."""
    if isinstance(source, Partial):
        return reduce_scatter(BLOCKS, source.op) if isinstance(target, Split) else all_reduce(op=source.op)
    return all_gather(BLOCKS) if not isinstance(target, Split) else ()


def exchanged_shape(shape: Sequence[int], source: Signature, target: Signature) -> tuple[int, ...]:
    """The shape in which a tensor is exchanged: flat, or what its split divides between what stays together."""
    split = source if isinstance(source, Split) else target
    if not isinstance(split, Split):
        return (math.prod(shape),)
    before, size, behind = math.prod(shape[: split.dim]), shape[split.dim], math.prod(shape[split.dim + 1 :])
    return before * split.outer, size // (split.outer * split.unit), split.unit * behind


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
        split = self.source if isinstance(self.source, Split) else self.target
        if isinstance(split, Split):
            shape[split.dim] = split.outer * part.shape[BLOCKS] * split.unit
        return part.view(shape)
