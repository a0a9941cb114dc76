"""Where a loss finds tensors that it is not given: filled for one call, and put back.

A forward may leave tensors in attributes, dicts and lists that the loss reads
(:class:`roundelay.frontend.export_adapter.Left`), and a loss may read the model's own weights: a penalty over them, a
layer that the forward does not call. They travel to the last stage as outputs of the model. There the person's loss
finds them where it looks for them.

The model is one in all threads of a process, so a call that fills places keeps a lock that an evaluation takes, too.
Who takes both takes that of torch's generator first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.frontend.export_adapter import Left, Opaque
from roundelay.frontend.keyed_rng import GeneratorLock
from roundelay.frontend.reachable_state import ReachableState, StateSlot

MODEL_LOCK = GeneratorLock("what the model's attributes hold")
"""Held while the loss finds tensors in the model's attributes, and while an evaluation calls the model."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer of the model that the loss reads, and every slot that holds it.

    Args:
        name: its first name in the model.
        tensor: the model's own.
        slots: of modules, closures, dicts and lists.
    """

    name: str
    tensor: torch.Tensor
    slots: tuple[StateSlot, ...]


def weights_at(world: ReachableState, named: Mapping[str, torch.Tensor]) -> tuple[Weight, ...]:
    """Where these parameters and buffers can be reached."""
    return tuple(Weight(name, tensor, tuple(world.holding(tensor))) for name, tensor in named.items())


@dataclass(frozen=True, slots=True)
class ClosureSlots:
    """What a loss finds beside its arguments.

    Args:
        left: where the forward leaves tensors; their leaves follow the result's.
        weights: of the model, which follow these.
        start: number of the first of these leaves.
    """

    left: tuple[Left, ...]
    weights: tuple[Weight, ...]
    start: int

    @property
    def count(self) -> int:
        """How many leaves they have."""
        return sum(one.shape.num_tensors for one in self.left) + len(self.weights)

    @contextmanager
    def filled(self, leaf: Callable[[int], Any]) -> Iterator[None]:
        """The block finds these leaves in their places; afterwards there is what was there before.

        Args:
            leaf: number of a leaf to its tensor, or to what tells that it was not seen to be read.
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
        place = self.start
        for one in self.left:
            count = one.shape.num_tensors
            one.slot.write(one.shape.unflatten({i: leaf(place + i) for i in range(count)}))
            place += count
        for weight in self.weights:
            value = leaf(place)
            place += 1
            for slot in weight.slots:
                now = slot.read()
                if slot.kind == "contents":
                    value_there: Any = [value if item is weight.tensor else item for item in now]
                else:
                    value_there = value
                slot.write(value_there)


def unread(places: ClosureSlots, i: int) -> Opaque:
    """What stands for a leaf that the loss was not seen to read."""
    place = places.start
    for one in places.left:
        place += one.shape.num_tensors
        if i < place:
            return Opaque(f"{one.slot.path}, which the forward sets")
    return Opaque(f"parameter {places.weights[i - place].name!r}")
