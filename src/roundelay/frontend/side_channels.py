"""Ways past the call's arguments: what ``inputs`` leaves for the loss, and writes into tensors of the batch.

In plain PyTorch ``inputs``, forward and loss follow one another on one batch. Here stage 0 calls ``inputs`` for further
micro-batches before the last stage calls the loss for this one, and each works on tensors of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import CaptureError, JobError
from roundelay.frontend.reachable_state import Change, ReachableState, set_at

Written = Mapping[str, torch.Tensor]
"""Tensors of a batch by path."""


def refuse_left(changes: Sequence[Change], model: torch.nn.Module, loss: Any) -> None:
    """Refuse an ``inputs`` that sets what the model or the loss can read otherwise than by the call or the batch.

    Args:
        changes: what a call of it changes.
        model: the model.
        loss: the loss.

    Raises:
        JobError: it does.
    """
    if not changes:
        return
    readers = ReachableState([("model", model), ("loss", loss)], torch.nn.Module())
    names = readers.names_read()
    for change in changes:
        if change.slot.place in readers.slots and change.slot.name in names:
            where = set_at(change)
            raise JobError(
                f"{change.slot.path}, which Job(inputs=...) sets and the model or the loss can read"
                f"{', ' + where if where else ''}",
                got="a way from one to the other past the model's call and the batch",
                expected="a call, and a loss, of the same batch: inputs is called for further micro-batches before the "
                "loss is for this one",
                remedy='Let inputs put it into the batch, as in batch["lam"] = lam, which the loss is given, or into '
                "the model's call.",
            )


def refuse_written(written: Collection[str], read: Collection[str], batch: Written) -> None:
    """Refuse a forward that writes into a tensor of the batch that the loss reads afterwards.

    Args:
        written: paths in the batch of what the forward writes into.
        read: paths of what the loss reads.
        batch: its tensors by path, as the loader gave them: two may be one.

    Raises:
        CaptureError: it does.
    """
    for path in written:
        also = [other for other in read if _memory(batch[other]) == _memory(batch[path])]
        if also:
            raise CaptureError(
                f"batch field {path!r}, which the model's forward writes into",
                got=f"a tensor that the loss reads afterwards{'' if also[0] == path else f', as field {also[0]!r}'}",
                expected="a forward that leaves the batch as it is: the loss is given the batch of the loader",
                remedy="Write into a copy, x = x.clone(), or leave inplace=True out of the first layer.",
            )


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor lies; 0 of one that is refused for its layout, or that is empty."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def fields_of(tensors: Sequence[torch.Tensor], batch: Written) -> list[str | None]:
    """For each tensor of the model's call the field of the batch in whose memory it lies; None: in its own."""
    places = {memory: path for path, leaf in reversed(list(batch.items())) if (memory := _memory(leaf))}
    return [places.get(_memory(tensor)) for tensor in tensors]
