"""The loss as the last segment.

The loss is the user's function of the model's result and the batch. Only the tensors that it has read on the first
batch (:mod:`roundelay.frontend.loss_reads`) travel to the last stage. All others are replaced by an :class:`Opaque`,
which raises an error if the loss reads it for a later batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from roundelay.errors import JobError
from roundelay.frontend.batch import Batch, as_number, is_number, replace, without_tensors
from roundelay.frontend.export.export_adapter import Opaque, OutputShape
from roundelay.frontend.label_counts import Labels, LabelWatch
from roundelay.frontend.loss_closure import ClosureSlots, unread
from roundelay.frontend.loss_metrics import Metrics, tensors
from roundelay.frontend.loss_metrics import split as without_metrics

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class LossReads:
    """What the loss reads.

    Args:
        outputs: indices of output leaves; of leaves that are the same tensor, the first. The leaves of the model's
            result are followed by those that the forward leaves elsewhere, then by weights of the model.
        batch: paths of batch leaves.
        counts: it returns (sum, count).
        writes: it writes into what it reads, so it gets copies.
        draws: it draws random numbers, so it runs under the micro-batch's key.
        first: for every output leaf the first leaf that is the same tensor.
        weights: parameters and buffers that it reads from the model itself.
        metrics: the metrics that it returns; not part of the model's identity, hence not in the repr.
        labels: where the number of labels comes from, if the loss is a mean over labels; not in the repr either.
    """

    outputs: tuple[int, ...]
    batch: tuple[str, ...]
    counts: bool
    writes: bool
    draws: bool
    first: tuple[int, ...]
    weights: tuple[str, ...] = ()
    metrics: Metrics = field(default=(), repr=False)
    labels: Labels | None = field(default=None, repr=False)


def checked(value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss's result without metrics as (scalar, None) or (sum, count).

    Raises:
        JobError: it is neither.
    """
    value, _ = without_metrics(value)
    parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(parts) == 2 and isinstance(parts[1], (int, float)):
        parts = (parts[0], torch.tensor(float(parts[1])))
    elif len(parts) == 2 and isinstance(parts[1], (torch.SymInt, torch.SymFloat)):  # while the loss is traced
        number: Any = parts[1]
        parts = (parts[0], torch.scalar_tensor(number, dtype=torch.get_default_dtype()))
    good = len(parts) in (1, 2) and all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in parts)
    if not good or not parts[0].is_floating_point():
        got = [f"tensor of shape {tuple(p.shape)} {p.dtype}" if isinstance(p, torch.Tensor) else repr(p) for p in parts]
        raise JobError(
            "the loss",
            got=f"{' and '.join(got)}",
            expected="one floating-point scalar (the mean over the micro-batch's rows), or the pair (sum, count); or "
            "a dict with such a 'loss' and metrics",
            remedy="Reduce it with .mean(), or return (loss.sum(), number_of_terms)."
            if value is not None
            else "A Hugging Face model computes its loss where its call has labels: "
            'Job(inputs=lambda batch: ((), {**batch, "labels": batch["input_ids"]})).',
        )
    first = parts[0].reshape(())
    if first.dtype.itemsize < torch.float32.itemsize:  # it is summed, and a count would be rounded
        first = first.float()
    return (first, parts[1].reshape(()).to(first.dtype)) if len(parts) == 2 else (first, None)


def with_tensors(
    batch: Batch, tensor: Callable[[str], Any], number: Callable[[str, Any], Any] = lambda path, leaf: None
) -> Batch:
    """A batch of the same layout as the loss gets it: tensors and numbers by path, stand-ins for what is not sent.

    Args:
        batch: of the layout.
        tensor: path to tensor.
        number: path and the layout's number to the number; None if it is not sent.
    """

    def stand_in(path: str, leaf: Any) -> Any:
        if leaf is None:
            return None
        if is_number(leaf) and (own := number(path, leaf)) is not None:
            return own
        how = " (give it as torch.from_numpy(array))" if isinstance(leaf, (np.ndarray, np.generic)) else ""
        return Opaque(f"batch field {path!r}, a {type(leaf).__name__}{how}")

    return replace(batch, lambda path, _: tensor(path), stand_in, whole=without_tensors)


@dataclass(frozen=True, slots=True)
class LossCall:
    """The loss as a function of the tensors that are sent to the last stage.

    Args:
        loss: the user's loss.
        reads: what it reads.
        shape: layout of the model's result.
        places: slots from which it reads what is not an argument.
        layout: a batch of the right layout; its tensors are not used.
    """

    loss: LossFunction
    reads: LossReads
    shape: OutputShape
    places: ClosureSlots
    layout: Batch

    def __call__(self, *values: Any) -> list[torch.Tensor]:
        """The loss of one micro-batch.

        Args:
            values: outputs read, the number of labels if the model counts them, batch leaves read.

        Returns:
            [loss], [sum, count] or, for a mean over labels, [loss, labels]; then metrics.
        """
        if self.reads.writes:
            values = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
        read = dict(zip(self.reads.outputs, values, strict=False))
        shown = range(self.shape.num_tensors)
        outputs = {i: self._leaf(read, i) for i in shown}
        labels, num_outputs = self.reads.labels, len(self.reads.outputs)
        counted = labels is not None and labels.output >= 0
        fields = dict(zip(self.reads.batch, values[num_outputs + counted :], strict=True))
        batch = with_tensors(
            self.layout,
            lambda path: fields.get(path, Opaque(f"batch field {path!r}")),
            lambda path, _: _number(fields[path]) if path in fields else None,
        )
        watch = LabelWatch()
        with self.places.filled(lambda i: self._leaf(read, i)), watch if labels and not counted else nullcontext():
            value = self.loss(self.shape.unflatten(outputs), batch)
        loss, count = checked(value)
        metrics = tensors(without_metrics(value)[1], self.reads.metrics)
        if labels is not None:
            terms = values[num_outputs] if counted else watch.terms_of(without_metrics(value)[0])
            return [*_of_labels(loss, terms), *metrics]
        return [loss, *metrics] if count is None else [loss, count, *metrics]

    def _leaf(self, read: Mapping[int, Any], i: int) -> Any:
        """An output leaf, or the stand-in for one that was not read on the first batch."""
        one = self.reads.first[i]
        if one in read:
            return read[one]
        return Opaque(f"output {i}") if i < self.places.start else unread(self.places, i)


def _number(value: Any) -> Any:
    """A number as the person's code gets it."""
    return as_number(value) if isinstance(value, torch.Tensor) else value


def _of_labels(loss: torch.Tensor, terms: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over labels and their number; without labels the mean is 0 instead of 0/0, with zero gradients.

    The number is NaN if the loss is not such a mean this time; it is not used for a batch in one micro-batch.
    """
    if terms is None:
        return loss, loss.new_full((), math.nan, dtype=torch.float64).detach()
    return torch.where(terms.detach() > 0, loss, 0.0), terms.detach()
