"""Rematerialisation: a segment whose tape holds its inputs only, and whose backward first runs the forward again.

The weights of the second forward are those that the mode's backward reads anyway:

* ``stash``: the forward's, which the tape holds in any case. The same weights, inputs, random numbers (by their key)
  and buffers (as before the forward) give the same activations bit for bit, and so the same gradients: only time is
  traded for memory (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
* ``mixed``: the backward's. ``mixed`` holds no weights of the forward, so the forward's activations cannot be
  reproduced; the segment is differentiated as by the mode ``recompute``, at the weights passed to the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.frontend.stages.segment import Leaves, Segment, Tape, Tensors, storages_of


@dataclass(slots=True)
class RematTape(Tape):
    """What the forward of such a segment keeps for its backward.

    Args:
        leaves: the forward's weights for ``stash``; None for ``mixed``, whose backward gets its own.
        values: the inputs by name.
        buffers: by name, as they were before the forward.
        rng_key: key of the random numbers.
        saved_bytes: bytes that the forward would have kept in addition to inputs and outputs; 0 if not measured.
    """

    leaves: Leaves | None
    values: dict[str, Any]
    buffers: Tensors
    rng_key: RngKey
    saved_bytes: int


class RematSegment(Segment):
    """A segment that keeps only its inputs between forward and backward."""

    __slots__ = ()

    @staticmethod
    def of(segment: Segment) -> RematSegment:
        """Return the same segment, recomputed by its backward."""
        return RematSegment(*(getattr(segment, field.name) for field in fields(segment)))

    def forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        inputs: Mapping[str, Any],
        rng_key: RngKey,
        *,
        mixed: bool = False,
        measure: bool = False,
        cached_leaves: Leaves | None = None,
    ) -> tuple[dict[str, Any], Tape]:
        """Run the forward and keep what it takes to run it again; arguments as of :meth:`Segment.forward`."""
        before = {n: buffers[n] for n in self.spec.buffers}
        leaves = None if mixed else cached_leaves or self.leaves(params)
        # record a graph and drop it: without one some kernels give other bits
        outputs, tape = super().forward(params, buffers, inputs, rng_key, measure=measure, cached_leaves=leaves)
        values = {n: inputs[n] for n in self.spec.inputs}
        held = storages_of([*values.values(), *(before[n] for n in self.mutated)]) if measure else {}
        excluded = held.keys() | storages_of(outputs.values()).keys() if measure else set()
        saved_bytes = sum(size for address, size in tape.storages.items() if address not in excluded)
        trained = {} if leaves is None else leaves.trained
        return outputs, RematTape({}, {}, trained, None, held, [], leaves, values, before, rng_key, saved_bytes)

    def backward(
        self, tape: Tape, grad_outputs: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Run the forward again, then the backward or its first half; as :meth:`Segment.backward`."""
        assert isinstance(tape, RematTape)
        _, again = super().forward(params, dict(tape.buffers), tape.values, tape.rng_key, cached_leaves=tape.leaves)
        gradients = super().backward(again, grad_outputs, params)
        tape.parameters, tape.pending = again.parameters, again.pending  # for the second half
        return gradients
