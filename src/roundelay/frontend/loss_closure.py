"""Slots from which a loss reads tensors that are not its arguments: filled for one call, then restored.

A forward may leave tensors in attributes, dicts and lists that the loss reads
(:class:`roundelay.frontend.export.export_adapter.SideOutput`), and a loss may read the model's weights: a penalty over
them, a layer that the forward does not call. They travel to the last stage as outputs of the model, and are put there
into the slots from which the loss reads.

All threads of a process share the model, so a call that fills slots holds a lock that an evaluation takes as well. A
thread that takes both takes :data:`roundelay.frontend.stages.keyed_rng.DEFAULT_GENERATOR_LOCK` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.frontend.export.export_adapter import Opaque, SideOutput
from roundelay.frontend.stages.keyed_rng import GeneratorLock
from roundelay.reach.reachable_state import ReachableState, StateSlot

MODEL_LOCK = GeneratorLock("what the model's attributes hold")
"""Held while a loss call has tensors in the model's attributes, and while an evaluation calls the model."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer of the model that the loss reads, and every slot that holds it.

    Args:
        name: its first name in the model.
        tensor: the model's own.
        slots: in modules, closures, dicts and lists.
    """

    name: str
    tensor: torch.Tensor
    slots: tuple[StateSlot, ...]


def weights_at(state: ReachableState, named: Mapping[str, torch.Tensor]) -> tuple[Weight, ...]:
    """The slots through which these parameters and buffers can be reached."""
    return tuple(Weight(name, tensor, tuple(state.holding(tensor))) for name, tensor in named.items())


@dataclass(frozen=True, slots=True)
class ClosureSlots:
    """What a loss reads in addition to its arguments.

    Args:
        left: slots in which the forward leaves tensors; their leaves follow the result's.
        weights: weights of the model, whose leaves follow these.
        start: index of the first of these leaves.
    """

    left: tuple[SideOutput, ...]
    weights: tuple[Weight, ...]
    start: int

    @contextmanager
    def filled(self, leaf: Callable[[int], Any]) -> Iterator[None]:
        """Put the leaves into their slots within the block; restore the slots afterwards.

        Args:
            leaf: index of a leaf to its tensor, or to an :class:`Opaque` if it was not read on the first batch.
        """
        if not self.left and not self.weights:
            yield
            return
        with MODEL_LOCK:
            before = [(slot, slot.read()) for slot in self._slots()]
            try:
                self._fill(leaf)
                yield
            finally:
                for slot, value in reversed(before):
                    slot.write(value)

    def _slots(self) -> Iterator[StateSlot]:
        yield from (one.slot for one in self.left)
        yield from (slot for weight in self.weights for slot in weight.slots)

    def _fill(self, leaf: Callable[[int], Any]) -> None:
        position = self.start
        for one in self.left:
            count = one.shape.num_tensors
            one.slot.write(one.shape.unflatten({i: leaf(position + i) for i in range(count)}))
            position += count
        for weight in self.weights:
            value = leaf(position)
            position += 1
            for slot in weight.slots:
                if slot.kind == "contents":
                    slot.write([value if item is weight.tensor else item for item in slot.read()])
                else:
                    slot.write(value)


def unread(places: ClosureSlots, i: int) -> Opaque:
    """The stand-in for a leaf that the loss did not read on the first batch."""
    start = places.start
    for one in places.left:
        start += one.shape.num_tensors
        if i < start:
            return Opaque(f"{one.slot.path}, which the forward sets")
    return Opaque(f"parameter {places.weights[i - start].name!r}")
