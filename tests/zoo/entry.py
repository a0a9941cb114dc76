"""What an entry of the model zoo is, and the few functions that every use of one needs.

An entry is a model together with its data, its loss and the manner in which it is called, so that a test can say
"for every model" without knowing any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor] | tuple[Tensor, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
Draw = Callable[[torch.Generator, int, int], Batch]

ROWS = 6
SHORT_ROWS = 3


class Batches(Protocol):
    """Makes the batches of an entry."""

    def __call__(self, seed: int, num: int, *, short: bool = False, varying: bool = False) -> list[Batch]:
        """Return `num` batches of 6 rows, the same for the same arguments; torch's own generator is left alone.

        Args:
            seed: chooses the numbers.
            num: how many batches.
            short: every third batch, and the last, has 3 rows.
            varying: sequence lengths (or image sides) differ from batch to batch, where the entry `varies`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo.

    Args:
        name: its key in `ZOO`.
        build: seed to model, in training mode; seeds torch's default generator.
        batches: its data.
        loss: (outputs, batch) to a scalar, or to (sum, count) whose quotient is the loss.
        inputs: batch to (args, kwargs) of the call; None means all of a tuple but its last, or all of a dict as kwargs.
        draws: whether the model draws random numbers in training mode.
        tied: whether one parameter is used under several names or in several places.
        buffers: whether a forward pass in training mode changes buffers.
        varies: whether `batches(varying=True)` changes the shapes other than by rows.
        specialises: whether torch.export, left to itself, fixes the length to the sample's although the model allows
            any: recurrent layers, whose steps it walks through. Roundelay's capture does not.
    """

    name: str
    build: Callable[[int], nn.Module]
    batches: Batches
    loss: Loss
    inputs: Callable[[Any], Arguments] | None = None
    draws: bool = True
    tied: bool = False
    buffers: bool = False
    varies: bool = False
    specialises: bool = False


def built_by(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Return the `build` of a model that `make` creates: seed torch, create, set training mode."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return make().train()

    return build


def drawn_by(draw: Draw, lengths: tuple[int, ...]) -> Batches:
    """Return the `batches` of an entry whose one batch is `draw(generator, rows, length)`.

    Batch i has length `lengths[i % len(lengths)]` when varying, else `lengths[0]`.
    """

    def batches(seed: int, num: int, *, short: bool = False, varying: bool = False) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        made = []
        for index in range(num):
            few = short and (index % 3 == 2 or index == num - 1)
            length = lengths[index % len(lengths)] if varying else lengths[0]
            made.append(draw(generator, SHORT_ROWS if few else ROWS, length))
        return made

    return batches


def arguments(entry: Entry, batch: Batch) -> Arguments:
    """Return (args, kwargs) with which the model of `entry` is called on `batch`."""
    if entry.inputs is not None:
        return entry.inputs(batch)
    if isinstance(batch, dict):
        return (), dict(batch)
    return batch[:-1], {}


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Return rows `start` to `stop` (exclusive) of every tensor of `batch`, as views."""
    if isinstance(batch, dict):
        return {name: value[start:stop] for name, value in batch.items()}
    return tuple(value[start:stop] for value in batch)


def scalar(loss: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Return the scalar that a loss stands for: itself, or sum / count."""
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss
