"""What a micro-batch's loss counts in its batch: the gradient with which its backward begins."""

from __future__ import annotations

import math

import torch

from roundelay.errors import JobError
from roundelay.ir.graph import LOSS
from roundelay.ir.micro_batch import MicroBatch


def seed(
    header: MicroBatch, loss: torch.Tensor, *, counts: bool, scale: float = 1.0, lacking: float = 0.0
) -> dict[str, torch.Tensor | None]:
    """Return the gradient of the loss: the micro-batch's weight in the batch's mean, times the loss scale.

    Args:
        header: header of the micro-batch.
        loss: its loss.
        counts: whether losses are sums, whose number of terms the update divides by.
        scale: its loss scale.
        lacking: the part of its weight that its ignored labels would have; see :func:`lacking_weight`.
    """
    return {LOSS: torch.full_like(loss, scale * (1.0 if counts else header.weight - lacking))}


def lacking_weight(header: MicroBatch, labels: float, labels_per_row: float) -> float:
    """Return the part of a micro-batch's weight in the batch's mean that its ignored labels would have.

    The update divides by the sum of the remaining weights. With one micro-batch per batch it is 0, as the loss is
    the batch's mean already.

    Args:
        header: header of the micro-batch.
        labels: number of its labels that the loss counts; NaN if the loss is not a mean over labels.
        labels_per_row: of the sample.

    Raises:
        JobError: the loss is not a mean over labels for this batch.
    """
    if header.whole:
        return 0.0
    if math.isnan(labels):
        raise JobError(
            "the loss",
            got="a value other than the mean of a cross entropy, which it returned on the first batch",
            expected="the same kind of loss for every batch, so that its micro-batches can be weighted",
            remedy="Compute the loss in the same way for every batch, or give --micro-batches 1.",
        )
    return header.weight * (1.0 - labels / (header.rows * labels_per_row))
