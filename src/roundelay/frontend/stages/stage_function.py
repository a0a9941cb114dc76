"""Forward and backward of a stage: its segments in order, with the loss as the last segment of the last stage.

Values travel by name from reader to reader (:mod:`roundelay.lower.partition`), and their gradients travel back the same
way: a segment that passes a value on receives the later readers' gradient as that of an output, and autograd adds the
segment's own. So all gradients are summed within autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any, Literal

import torch

from roundelay.frontend.stages.deferred_wgrad import PendingWgrad
from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.frontend.stages.segment import Leaves, Segment, Tape, Tensors, storages_of
from roundelay.frontend.stages.split_backward import settle
from roundelay.ir.program import END

Mode = Literal["stash", "recompute", "mixed"]
Debt = list[tuple[list[PendingWgrad], Tensors]]
"""What the first half of a backward leaves for the second: each segment's pending weight gradients and parameters."""


@dataclass(slots=True)
class StageTape:
    """What one forward of a stage keeps for its backward.

    Args:
        mode: the backward mode.
        tapes: one per segment; empty for ``recompute``.
        inputs: the stage's inputs, held by ``recompute`` only.
        buffers: the buffers before the forward, held by ``recompute`` only.
        rng_key: key of the random numbers.
        num_bytes: bytes held for backward, parameters not counted; -1 if not measured.
        debt: what the first half of the backward has left for the second.
    """

    mode: Mode
    tapes: list[Tape]
    inputs: dict[str, Any]
    buffers: Tensors
    rng_key: RngKey
    num_bytes: int
    debt: Debt = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StageFunction:
    """Forward and backward of one stage.

    Args:
        segments: in order; the loss is one of them on the last stage.
        inputs: values that the stage receives.
        outputs: values that it sends to other stages, or the loss (and its count).
        borders: numbers of the segments after which values are boxed, on a worker of a mesh.
        narrowed: by name of an output, what makes this worker's part of a gradient that it gets whole.
    """

    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    borders: tuple[int, ...] = ()
    narrowed: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict, hash=False)

    def part(self, start: int, stop: int) -> StageFunction:
        """Segments ``start`` to ``stop - 1``: what they read from outside as inputs, what is read later as outputs."""
        own, later = self.segments[start:stop], self.segments[stop:]
        wanted = {*self.outputs, *(name for segment in later for name in segment.spec.inputs)}
        made: dict[str, None] = {}
        read: dict[str, None] = {}
        for segment in own:
            read |= dict.fromkeys(name for name in segment.spec.inputs if name not in made)
            made |= dict.fromkeys(segment.spec.outputs)
        borders = tuple(border - start for border in self.borders if start <= border < stop)
        outputs = tuple(name for name in made if name in wanted)
        narrowed = {n: self.narrowed[n] for n in self.narrowed.keys() & made.keys() - read.keys()}
        return StageFunction(own, tuple(read), outputs, borders, narrowed)

    @property
    def parts(self) -> tuple[StageFunction, ...]:
        """The parts between which values are boxed, in the order of the forward."""
        places = [0, *(border + 1 for border in self.borders), END]
        return tuple(self.part(start, stop) for start, stop in pairwise(places)) if self.borders else (self,)

    def forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        inputs: Mapping[str, Any],
        rng_key: RngKey,
        *,
        mode: Mode,
        measure: bool = False,
        cached_leaves: Sequence[Leaves] = (),
    ) -> tuple[dict[str, Any], StageTape]:
        """Run the forward with the given weights.

        Args:
            params: weights by name; never written.
            buffers: by name; entries that the forward changes are replaced.
            inputs: values by name.
            rng_key: key of the random numbers.
            mode: the backward mode.
            measure: count the bytes that the tape holds.
            cached_leaves: what :meth:`leaves` returned for these weights, to use them in several forwards.

        Returns:
            The stage's outputs by name, and the tape.
        """
        values = dict(inputs)
        before = dict(buffers) if mode == "recompute" else {}
        tapes = self._run_forward(
            params, buffers, values, rng_key, mixed=mode == "mixed", measure=measure, cached_leaves=cached_leaves
        )
        outputs = {n: values[n] for n in self.outputs}
        if mode == "recompute":  # a graph was recorded, and is dropped: without one some kernels give other bits
            held = sum(storages_of(self._kept_for_recompute(inputs, before)).values()) if measure else -1
            return outputs, StageTape(mode, [], {n: inputs[n] for n in self.inputs}, before, rng_key, held)
        held = sum({k: v for tape in tapes for k, v in tape.storages.items()}.values()) if measure else -1
        return outputs, StageTape(mode, tapes, {}, {}, rng_key, held)

    def backward(
        self, tape: StageTape, grad_outputs: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Compute the gradients of the stage's inputs and parameters, by name; names without a gradient are missing.

        For segments with ``halves`` it is the first half, and leaves ``tape.debt`` for :meth:`backward_weights`.

        Args:
            tape: of the forward.
            grad_outputs: gradients of the stage's outputs by name.
            params: the weights that ``recompute`` and ``mixed`` read; ``stash`` has its own.
        """
        tapes = tape.tapes
        if tape.mode == "recompute":
            tapes = self._run_forward(
                params, dict(tape.buffers), dict(tape.inputs), tape.rng_key, mixed=False, measure=False
            )
        grads = {n: self._own_part(n, grad) for n, grad in grad_outputs.items()}
        of_params: Tensors = {}
        for segment, part in zip(reversed(self.segments), reversed(tapes), strict=True):
            of_inputs, own = segment.backward(part, {n: grads.pop(n, None) for n in segment.spec.outputs}, params)
            grads.update(of_inputs)
            of_params.update(own)
            if part.pending:
                tape.debt.append((part.pending, part.parameters))
        return {n: grad for n in self.inputs if (grad := grads.get(n)) is not None}, of_params

    def leaves(self, params: Mapping[str, torch.Tensor]) -> Sequence[Leaves]:
        """Return leaves that share the weights' memory; they are valid as long as the weights keep that memory."""
        return [segment.leaves(params) for segment in self.segments]

    @staticmethod
    def backward_weights(debt: Debt) -> Tensors:
        """Run the second half of a backward: the parameter gradients that the first half has left out, by name."""
        return {name: grad for pending, parameters in debt for name, grad in settle(pending, parameters).items()}

    @property
    def halved(self) -> bool:
        """Whether the backward is split in two halves."""
        return any(segment.halves is not None for segment in self.segments)

    def _own_part(self, name: str, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad if grad is None or name not in self.narrowed else self.narrowed[name](grad)

    def _run_forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        values: dict[str, Any],
        rng_key: RngKey,
        *,
        mixed: bool,
        measure: bool,
        cached_leaves: Sequence[Leaves] = (),
    ) -> list[Tape]:
        """Run the forward of every segment, adding its outputs to ``values``; return the tapes."""
        tapes = []
        for segment, leaves in zip(self.segments, cached_leaves or repeat(None)):  # noqa: B905  # repeat has no end
            outputs, tape = segment.forward(
                params, buffers, values, rng_key, mixed=mixed, measure=measure, cached_leaves=leaves
            )
            values.update(outputs)
            tapes.append(tape)
        return tapes

    def _kept_for_recompute(self, inputs: Mapping[str, Any], buffers: Tensors) -> Sequence[Any]:
        mutated = {n for segment in self.segments for n in segment.mutated}
        return [*(inputs[n] for n in self.inputs), *(b for n, b in buffers.items() if n in mutated)]


def debt_bytes(debt: Debt) -> int:
    """Bytes held for a backward's second half."""
    waiting = [one for pending, _ in debt for one in pending if one.grad_output is not None]
    return sum(storages_of(tensor for one in waiting for tensor in (*one.saved, one.grad_output)).values())
