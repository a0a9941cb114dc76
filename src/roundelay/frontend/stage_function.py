"""A stage as a pair of functions: its segments in order, the loss as the last segment of the last stage.

Values travel by name, from segment to segment along the chain of their readers (:mod:`roundelay.lower.partition`), and
so do their gradients: a segment that hands a value on gets the later readers' gradient as that of an output, and
autograd adds its own. No sum of gradients stands outside of autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

import torch

from roundelay.frontend.deferred_wgrad import PendingWgrad
from roundelay.frontend.keyed_rng import RngKey
from roundelay.frontend.segment import Leaves, Segment, Tape, Tensors
from roundelay.frontend.split_backward import settle

Mode = Literal["stash", "recompute", "mixed"]
Debt = list[tuple[list[PendingWgrad], Tensors]]
"""What a backward in two halves leaves for its second one: for each segment what is owed, and its parameters."""


@dataclass(slots=True)
class StageTape:
    """What one forward of a stage leaves for its backward.

    Args:
        mode: the backward mode it was made for.
        tapes: one per segment; empty for ``recompute``.
        inputs: the stage's inputs, held by ``recompute`` only.
        buffers: the buffers before the forward, held by ``recompute`` only.
        draw: key of the random numbers.
        num_bytes: bytes held for backward, parameters not counted; -1 if not measured.
        debt: what its backward has left for the weights' half.
    """

    mode: Mode
    tapes: list[Tape]
    inputs: dict[str, Any]
    buffers: Tensors
    draw: RngKey
    num_bytes: int
    debt: Debt = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StageFunction:
    """Forward and backward of one stage.

    Args:
        segments: in order; the loss is one of them on the last stage.
        inputs: values that reach the stage from outside.
        outputs: values that leave it: to other stages, or the loss (and its count).
    """

    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        inputs: Mapping[str, Any],
        draw: RngKey,
        *,
        mode: Mode,
        measure: bool = False,
        kept: Sequence[Leaves] = (),
    ) -> tuple[dict[str, Any], StageTape]:
        """Run forward with the given weights.

        Args:
            params: weights by name; never written.
            buffers: by name; entries that the forward changes are replaced.
            inputs: values by name.
            draw: key of the random numbers.
            mode: what backward will read.
            measure: count the bytes that the tape holds.
            kept: what :meth:`leaves` has made of these very weights, for a caller who uses them more than once.

        Returns:
            The stage's outputs by name, and the tape.
        """
        values = dict(inputs)
        before = dict(buffers) if mode == "recompute" else {}
        tapes = self._taped(params, buffers, values, draw, mixed=mode == "mixed", measure=measure, kept=kept)
        outputs = {n: values[n] for n in self.outputs}
        if mode == "recompute":  # with a graph that is dropped: some kernels give other bits when none is asked for
            held = _num_bytes(self._held(inputs, before)) if measure else -1
            return outputs, StageTape(mode, [], {n: inputs[n] for n in self.inputs}, before, draw, held)
        held = sum(_union(tape.storages for tape in tapes).values()) if measure else -1
        return outputs, StageTape(mode, tapes, {}, {}, draw, held)

    def backward(
        self, tape: StageTape, grad_outputs: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Gradients of the stage's inputs and of its parameters, by name; missing where none arrives.

        Of segments with ``halves`` it is the first half, and leaves ``tape.debt`` for :meth:`weights`.

        Args:
            tape: of the forward.
            grad_outputs: gradients of the stage's outputs by name.
            params: the weights that ``recompute`` and ``mixed`` read; ``stash`` has its own.
        """
        tapes = tape.tapes
        if tape.mode == "recompute":
            tapes = self._taped(params, dict(tape.buffers), dict(tape.inputs), tape.draw, mixed=False, measure=False)
        grads = dict(grad_outputs)
        of_params: Tensors = {}
        for segment, part in zip(reversed(self.segments), reversed(tapes), strict=True):
            of_inputs, own = segment.backward(part, {n: grads.pop(n, None) for n in segment.spec.outputs}, params)
            grads.update(of_inputs)
            of_params.update(own)
            if part.owed:
                tape.debt.append((part.owed, part.parameters))
        return {n: grad for n in self.inputs if (grad := grads.get(n)) is not None}, of_params

    def leaves(self, params: Mapping[str, torch.Tensor]) -> Sequence[Leaves]:
        """The weights as forwards read them: they hold the weights' memory, and are good as long as those lie in it."""
        return [segment.leaves(params) for segment in self.segments]

    @staticmethod
    def weights(debt: Debt) -> Tensors:
        """The second half of a backward: the gradients of parameters that the first half has left out, by name."""
        return {name: grad for owed, parameters in debt for name, grad in settle(owed, parameters).items()}

    @property
    def halved(self) -> bool:
        """Whether its backward is the first of two halves."""
        return any(segment.halves is not None for segment in self.segments)

    def _taped(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        values: dict[str, Any],
        draw: RngKey,
        *,
        mixed: bool,
        measure: bool,
        kept: Sequence[Leaves] = (),
    ) -> list[Tape]:
        """Run every segment forward with a tape, adding its outputs to ``values``."""
        tapes = []
        for segment, leaves in zip(self.segments, kept or repeat(None)):  # noqa: B905  # as long as the first
            made, tape = segment.forward(params, buffers, values, draw, mixed=mixed, measure=measure, kept=leaves)
            values.update(made)
            tapes.append(tape)
        return tapes

    def _held(self, inputs: Mapping[str, Any], buffers: Tensors) -> Sequence[Any]:
        mutated = {n for segment in self.segments for n in segment.mutated}
        return [*(inputs[n] for n in self.inputs), *(b for n, b in buffers.items() if n in mutated)]


def debt_bytes(debt: Debt) -> int:
    """Bytes that wait for a backward's second half."""
    waiting = [one for owed, _ in debt for one in owed if one.gradient is not None]
    return _num_bytes([tensor for one in waiting for tensor in (*one.read, one.gradient)])


def _union(storages: Any) -> dict[int, int]:
    return {address: size for part in storages for address, size in part.items()}


def _num_bytes(values: Sequence[Any]) -> int:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
