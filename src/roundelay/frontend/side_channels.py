"""Refuse data that passes from ``inputs`` or the forward to the loss other than through the call and the batch.

In plain PyTorch ``inputs``, forward and loss run one after the other on one batch. In a pipeline stage 0 calls
``inputs`` for further micro-batches before the last stage calls the loss for this one, and each has its own tensors.
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
    """Refuse an ``inputs`` that sets a variable or attribute that the model or the loss can read.

    Args:
        changes: what a call of ``inputs`` changes.
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
                got="a side channel that bypasses the model's call and the batch",
                expected="a call, and a loss, of the same batch: inputs is called for further micro-batches before the "
                "loss is for this one",
                remedy='Let inputs put it into the batch, as in batch["lam"] = lam, which the loss receives, or into '
                "the model's call.",
            )


def refuse_written(written: Collection[str], read: Collection[str], batch: Written) -> None:
    """Refuse a forward that writes into a tensor of the batch that the loss reads afterwards.

    Args:
        written: paths of the batch's tensors that the forward writes into.
        read: paths of those that the loss reads.
        batch: the batch's tensors by path, as the loader yielded them: two paths may share memory.

    Raises:
        CaptureError: it does.
    """
    for path in written:
        shared = [other for other in read if _memory(batch[other]) == _memory(batch[path])]
        if shared:
            raise CaptureError(
                f"batch field {path!r}, which the model's forward writes into",
                got="a tensor that the loss reads afterwards"
                f"{'' if shared[0] == path else f', as field {shared[0]!r}'}",
                expected="a forward that leaves the batch as it is: the loss receives the loader's batch",
                remedy="Write into a copy, x = x.clone(), or leave inplace=True out of the first layer.",
            )


def _memory(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 for an empty tensor or one that is not strided."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def fields_of(tensors: Sequence[torch.Tensor], batch: Written) -> list[str | None]:
    """For each tensor of the model's call the batch field whose memory it shares; None if it shares none."""
    places = {memory: path for path, leaf in reversed(list(batch.items())) if (memory := _memory(leaf))}
    return [places.get(_memory(tensor)) for tensor in tensors]
