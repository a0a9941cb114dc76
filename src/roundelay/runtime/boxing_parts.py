"""Boxings within a stage: a value, or its gradient, as its exchange takes it, and as it is afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roundelay.ir.boxing import exchanged_shape, place_of
from roundelay.ir.sbp import Signature, Split
from roundelay.runtime.collectives import Parts


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
        plain = value.resolve_conj().resolve_neg()
        return (plain.reshape(exchanged_shape(value.shape, self.source, self.target)),)

    def unpacked(self, parts: Parts, given: Sequence[int]) -> torch.Tensor:
        """The boxed tensor, of what came and the shape of what was given."""
        (part,) = parts
        shape = list(given)
        for split, other in ((self.source, self.target), (self.target, self.source)):
            place = place_of(split, other)
            if isinstance(split, Split) and place is not None:
                shape[split.dim] = split.outer * part.shape[place] * split.unit
        return part.view(shape)
