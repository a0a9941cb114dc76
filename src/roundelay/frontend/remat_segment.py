"""A segment that keeps its inputs only: its backward runs it forward again first.

Which weights that second forward reads follows from what the mode's backward would have read anyway:

* ``stash``: the forward's, which the tape holds in any case. From the same weights, inputs, random numbers (by their
  key) and buffers (as they were before) come the activations that were not kept, bit for bit, and so the gradients. It
  is a trade of time for memory alone (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016).
* ``mixed``: the backward's. ``mixed`` is there to hold no weights of the forward, so its activations cannot come out
  again; the segment is differentiated as the mode ``recompute`` would, at the weights given to the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from roundelay.frontend.keyed_rng import RngKey
from roundelay.frontend.segment import Leaves, Segment, Tape, Tensors


@dataclass(slots=True)
class RematTape(Tape):
    """What the forward of such a segment leaves for its backward.

    Args:
        leaves: the forward's weights for ``stash``; None for ``mixed``, whose backward brings its own.
        values: the inputs by name.
        buffers: by name, as they were before the forward.
        draw: key of the random numbers.
        spared: bytes that the forward would have kept beside its inputs and outputs; 0 if not measured.
    """

    leaves: Leaves | None
    values: dict[str, Any]
    buffers: Tensors
    draw: RngKey
    spared: int


class RematSegment(Segment):
    """A segment of which a forward keeps the inputs only."""

    __slots__ = ()

    @staticmethod
    def of(segment: Segment) -> RematSegment:
        """The same segment, run again by its backward."""
        return RematSegment(*(getattr(segment, field.name) for field in fields(segment)))

    def forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        inputs: Mapping[str, Any],
        draw: RngKey,
        *,
        mixed: bool = False,
        measure: bool = False,
        kept: Leaves | None = None,
    ) -> tuple[dict[str, Any], Tape]:
        """Run forward, keeping what it takes to do so again; arguments as of :meth:`Segment.forward`."""
        before = {n: buffers[n] for n in self.spec.buffers}
        leaves = None if mixed else kept or self.leaves(params)
        # with a graph that is dropped: some kernels give other bits when none is asked for
        outputs, tape = super().forward(params, buffers, inputs, draw, measure=measure, kept=leaves)
        values = {n: inputs[n] for n in self.spec.inputs}
        held = _storages([*values.values(), *(before[n] for n in self.mutated)]) if measure else {}
        apart = held.keys() | _storages(outputs.values()).keys() if measure else set()
        spared = sum(size for address, size in tape.storages.items() if address not in apart)
        trained = {} if leaves is None else leaves.trained  # which updates leave as they are
        return outputs, RematTape({}, {}, trained, None, held, [], leaves, values, before, draw, spared)

    def backward(
        self, tape: Tape, grad_outputs: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Run forward again, then backward, or its first half; as :meth:`Segment.backward`."""
        assert isinstance(tape, RematTape)
        _, again = super().forward(params, dict(tape.buffers), tape.values, tape.draw, kept=tape.leaves)
        gradients = super().backward(again, grad_outputs, params)
        tape.parameters, tape.owed = again.parameters, again.owed  # for the second half
        return gradients


def _storages(values: Any) -> dict[int, int]:
    """Bytes of each storage behind the tensors among some values, by its address."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
