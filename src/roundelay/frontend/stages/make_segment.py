"""Segments from what computes them: a graph of a part of the model, or the loss as a function.

Both builders of stages use these functions, the one that has the person's model and the one that has data only
(:mod:`roundelay.frontend.plain_stage`), so that both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from roundelay.frontend.stages.keyed_rng import keyed_call
from roundelay.frontend.stages.on_device import OnDevice
from roundelay.frontend.stages.precision import FULL, autocast
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.frontend.stages.segment import Call, Segment
from roundelay.frontend.stages.split_backward import split
from roundelay.ir.stage import SegmentSpec


@dataclass(frozen=True, slots=True)
class Roles:
    """What becomes of the values of a segment.

    Args:
        trainable: names of parameters that require a gradient.
        differentiable: names of inputs that require a gradient.
        mutated: names of buffers that a forward changes.
    """

    trainable: frozenset[str]
    differentiable: frozenset[str]
    mutated: frozenset[str]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Where a segment computes, and in which precision."""

    device: torch.device
    precision: str

    def lowered(self, call: Call) -> Call:
        """The call under the autocast of the precision."""
        if self.precision == FULL:
            return call

        def lowered(*args: Any) -> Sequence[Any]:
            with autocast(self.precision, self.device):
                return call(*args)

        return lowered


def segment_of(
    piece: torch.fx.GraphModule,
    spec: SegmentSpec,
    roles: Roles,
    arithmetic: Arithmetic,
    call: Call | None = None,
    *,
    halved: bool,
) -> Segment:
    """A segment from its graph.

    Args:
        piece: a graph of parameters, buffers, inputs and the RNG key, on the device.
        spec: its names.
        roles: what becomes of its values.
        arithmetic: where and how it computes.
        call: what runs in the place of the graph, for a backward that is not split.
        halved: whether its backward is split in two.
    """
    lowers = arithmetic.precision != FULL
    call = arithmetic.lowered(piece.forward) if call is None else call
    segment = Segment(spec, call, roles.trainable, roles.differentiable, roles.mutated, casts=lowers)
    if not halved:
        return segment
    halves = split(piece, spec.parameters, roles.trainable, lowered=lowers)
    return replace(segment, halves=replace(halves, call=arithmetic.lowered(halves.call)))


def loss_segment_of(call: Call, spec: SegmentSpec, differentiable: frozenset[str], arithmetic: Arithmetic) -> Segment:
    """The segment of the loss: a call of what it reads and the key, :func:`drawing`."""
    device = arithmetic.device
    mode = None if device == CPU else OnDevice(device)  # of functions with a backward of their own, and of hooks
    around = nullcontext if mode is None else lambda: mode
    return Segment(spec, arithmetic.lowered(call), frozenset(), differentiable, frozenset(), around=around)


def drawing(loss: Callable[..., Any], position: int, device: torch.device) -> Call:
    """A loss as a call of its values and the key, by which its random numbers are drawn.

    Args:
        loss: of its values.
        position: among the random operations; -1 if it draws none.
        device: where it computes.
    """
    if position < 0:
        return lambda *values: loss(*values[:-1])
    return lambda *values: keyed_call(loss, *values[:-1], draw=values[-1], position=position, on=device)
