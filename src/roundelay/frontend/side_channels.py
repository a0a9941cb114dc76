"""Refuse data that passes from ``inputs`` or the forward to the loss other than through the call and the batch.

In plain PyTorch ``inputs``, forward and loss run one after the other on one batch. In a pipeline stage 0 calls
``inputs`` for further micro-batches before the last stage calls the loss for this one, and each has its own tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roundelay.errors import CaptureError, JobError
from roundelay.frontend.batch import SPARSE, Batch, leaves
from roundelay.frontend.export.export_adapter import CallShape, Inputs, default_inputs
from roundelay.frontend.loss import LossFunction
from roundelay.frontend.model_call import locked_if_random
from roundelay.reach.reachable_state import ReachableState, SlotId
from roundelay.reach.source_lines import set_at


@dataclass(frozen=True, slots=True)
class SampleCall:
    """How the model is called for the sample, and what else ``inputs`` does.

    Args:
        inputs: the user's ``inputs``.
        tensors: tensors of the call.
        shape: layout of the call.
        fields: for each of the tensors the batch field whose memory it shares; None if it shares none.
        written: batch fields that ``inputs`` writes into.
        kept: places of slots that it changes.
    """

    inputs: Inputs
    tensors: list[torch.Tensor]
    shape: CallShape
    fields: list[str | None]
    written: tuple[str, ...]
    kept: frozenset[SlotId]


def call_on_sample(model: torch.nn.Module, loss: LossFunction, inputs: Inputs | None, sample: Batch) -> SampleCall:
    """Call ``inputs`` on the sample and record its side effects.

    Raises:
        JobError: it sets a slot that the model or the loss can read; or the call has an array or a sparse tensor.
    """
    functions = [("loss", loss), *([] if inputs is None else [("inputs", inputs)])]
    state, before = ReachableState(functions, model), leaves(sample)
    versions = [leaf._version for leaf in before.values()]
    inputs, result = locked_if_random(inputs or default_inputs, sample)
    written = [path for (path, leaf), v in zip(before.items(), versions, strict=True) if leaf._version != v]
    changes = state.changes()
    readers = ReachableState([("model", model), ("loss", loss)], torch.nn.Module()) if changes else None
    if readers is not None and (change := readers.first_read(changes)) is not None:
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
    tensors, shape = CallShape.flatten(*result)
    _check_call(tensors, shape)
    fields = {address: path for path, leaf in reversed(leaves(sample).items()) if (address := _address(leaf))}
    kept = frozenset(change.slot.id for change in changes)
    return SampleCall(inputs, tensors, shape, [fields.get(_address(t)) for t in tensors], tuple(written), kept)


def _check_call(tensors: Sequence[torch.Tensor], call: CallShape) -> None:
    """Refuse arguments that would become constants, or that cannot be sent.

    Raises:
        JobError: the model is called with an array, or with a sparse tensor.
    """
    for i, leaf in call.constants.items():
        if isinstance(leaf, (np.ndarray, np.generic)):
            raise JobError(
                f"the call of the model, {call.named(i)}",
                got=f"a NumPy {type(leaf).__name__}",
                expected="tensors: all other arguments must be the same in every call",
                remedy="Let batches(epoch) yield torch.from_numpy(array), or torch.tensor(number), or convert it in "
                'Job(inputs=...): inputs=lambda batch: ((torch.from_numpy(batch["x"]),), {}).',
            )
    for i, tensor in enumerate(tensors):
        if tensor.layout in SPARSE:
            raise JobError(
                f"tensor {i} of the model's call",
                got=f"layout {str(tensor.layout).removeprefix('torch.')}",
                expected="tensors that hold every value",
                remedy="Call the model with x.to_dense(), or with its indices and values as tensors of their own.",
            )


def refuse_written(written: Collection[str], read: Collection[str], batch: Mapping[str, torch.Tensor]) -> None:
    """Refuse a forward that writes into a tensor of the batch that the loss reads afterwards.

    Args:
        written: paths of the batch's tensors that the forward writes into.
        read: paths of those that the loss reads.
        batch: the batch's tensors by path, as the loader yielded them: two paths may share memory.

    Raises:
        CaptureError: it does.
    """
    for path in written:
        shared = [other for other in read if _address(batch[other]) == _address(batch[path])]
        if shared:
            raise CaptureError(
                f"batch field {path!r}, which the model's forward writes into",
                got="a tensor that the loss reads afterwards"
                f"{'' if shared[0] == path else f', as field {shared[0]!r}'}",
                expected="a forward that leaves the batch as it is: the loss receives the loader's batch",
                remedy="Write into a copy, x = x.clone(), or leave inplace=True out of the first layer.",
            )


def _address(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 for an empty tensor or one that is not strided."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
