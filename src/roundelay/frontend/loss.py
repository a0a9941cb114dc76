"""The loss as the last segment, and what it reads.

The loss is the person's own function of the model's result and the batch. Which tensors it reads is seen by running it
once while every torch function it calls is watched; only those travel to the last stage. A tensor that was not seen
being read is replaced by a stand-in that tells, rather than guesses, when a later batch reads it after all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from roundelay.errors import JobError
from roundelay.frontend.batch import Batch, leaves, replace, without_tensors
from roundelay.frontend.batch import layout as layout_of
from roundelay.frontend.face import Opaque, OutputShape
from roundelay.frontend.metrics import Metrics, layout, tensors
from roundelay.frontend.metrics import split as without_metrics

LossFunction = Callable[[Any, Any], Any]


class _Watch(TorchFunctionMode):
    """Notes which of the watched tensors any torch function (attribute reads included) touches."""

    def __init__(self, watched: Mapping[int, str]) -> None:
        super().__init__()
        self.watched = watched
        self.seen: set[str] = set()

    def note(self, part: Any) -> None:
        """Note every watched tensor in a nest of tuples, lists and mappings."""
        if isinstance(part, torch.Tensor):
            if id(part) in self.watched:
                self.seen.add(self.watched[id(part)])
        elif isinstance(part, (tuple, list)):
            for item in part:
                self.note(item)
        elif isinstance(part, dict):
            for item in part.values():
                self.note(item)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(args)
        self.note(kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class LossReads:
    """What the loss reads.

    Args:
        outputs: indices of output leaves; of leaves that are one tensor the first.
        batch: paths of batch leaves.
        counts: it returns (sum, count).
        writes: it writes into what it reads, so it gets copies.
        draws: it draws random numbers, so it runs under the micro-batch's key.
        first: for every output leaf the first leaf that is the same tensor.
        metrics: what it returns beside the loss; no part of the model's identity, which is why it is not shown.
    """

    outputs: tuple[int, ...]
    batch: tuple[str, ...]
    counts: bool
    writes: bool
    draws: bool
    first: tuple[int, ...]
    metrics: Metrics = field(default=(), repr=False)


def record(loss: LossFunction, shape: OutputShape, outputs: Sequence[torch.Tensor], batch: Batch) -> LossReads:
    """Run the loss once on real outputs and see what it reads.

    Args:
        loss: the person's loss.
        shape: layout of the model's result.
        outputs: tensor leaves of the model's result.
        batch: the sample micro-batch.

    Raises:
        JobError: the loss raises, does not return a scalar (or a pair of scalars), or one that no gradient enters.
    """
    first = tuple(next(i for i, same in enumerate(outputs) if same is leaf) for leaf in outputs)
    fields = {path: leaf.clone() for path, leaf in leaves(batch).items()}  # own, even where the model returns an input
    watched = {id(outputs[i]): f"o{i}" for i in first} | {id(leaf): f"b{path}" for path, leaf in fields.items()}
    result = shape.unflatten(dict(enumerate(outputs)))
    before = [leaf._version for leaf in (*outputs, *fields.values())]
    state = torch.random.get_rng_state()
    with torch.enable_grad(), _Watch(watched) as watch:
        try:
            value = loss(result, replace(batch, lambda path, _: fields[path], _no_tensor, whole=without_tensors))
        except JobError:
            raise
        except Exception as error:  # the person's own code
            raise _failed(error, batch) from error
        watch.note(value)
    scalar, count = checked(value)
    beside = without_metrics(value)[1]
    metrics = layout(beside)
    tensors(beside, metrics)
    if not scalar.requires_grad:
        raise _without_gradient()
    return LossReads(
        outputs=tuple(i for i in range(len(outputs)) if f"o{i}" in watch.seen),
        batch=tuple(path for path in fields if f"b{path}" in watch.seen),
        counts=count is not None,
        writes=before != [leaf._version for leaf in (*outputs, *fields.values())],
        draws=not torch.equal(state, torch.random.get_rng_state()),
        first=first,
        metrics=metrics,
    )


def _no_tensor(path: str, leaf: Any) -> Any:
    """What stands for a leaf that is no tensor: it does not travel, so the loss may not read it."""
    if leaf is None:
        return None
    how = " (give it as torch.from_numpy(array))" if isinstance(leaf, (np.ndarray, np.generic)) else ""
    return Opaque(f"batch field {path!r}, a {type(leaf).__name__}{how}")


def _without_gradient() -> JobError:
    return JobError(
        "the loss",
        got="a value that no gradient enters",
        expected="a value that depends on a trained parameter through differentiable operations",
        remedy="Look for detach(), item(), argmax or no_grad in the loss or the model, and for frozen parameters.",
    )


def _failed(error: Exception, batch: Batch) -> JobError:
    return JobError(
        "the loss on the first batch",
        got=f"{type(error).__name__}: {error}",
        expected=f"a function (outputs, batch) -> scalar; this batch holds {', '.join(map(repr, leaves(batch)))}",
        remedy="Check the names of the labels in the batch and the layout of the model's outputs.",
    )


def checked(value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss's result as (scalar, None) or (sum, count), metrics beside it left out.

    Raises:
        JobError: it is neither.
    """
    value, _ = without_metrics(value)
    parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(parts) == 2 and isinstance(parts[1], (int, float)):
        parts = (parts[0], torch.tensor(float(parts[1])))
    good = len(parts) in (1, 2) and all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in parts)
    if not good or not parts[0].is_floating_point():
        got = [f"tensor of shape {tuple(p.shape)} {p.dtype}" if isinstance(p, torch.Tensor) else repr(p) for p in parts]
        raise JobError(
            "the loss",
            got=f"{' and '.join(got)}",
            expected="one floating-point scalar (the mean over the micro-batch's rows), or the pair (sum, count); or "
            "a dict with such a 'loss' and metrics beside it",
            remedy="Reduce it with .mean(), or return (loss.sum(), number_of_terms).",
        )
    first = parts[0].reshape(())
    if first.dtype.itemsize < torch.float32.itemsize:  # it is summed, and a count would be rounded
        first = first.float()
    return (first, parts[1].reshape(()).to(first.dtype)) if len(parts) == 2 else (first, None)


@dataclass(frozen=True, slots=True)
class LossCall:
    """The loss as a function of the tensors that reach the last stage.

    Args:
        loss: the person's loss.
        reads: what it reads.
        shape: layout of the model's result.
        layout: a batch of the right layout; its tensors are not used.
    """

    loss: LossFunction
    reads: LossReads
    shape: OutputShape
    layout: Batch

    @property
    def shown(self) -> Any:
        """What the loss is shown of that batch, beside tensors; every batch must be like it."""
        return layout_of(self.layout)

    def __call__(self, *values: Any) -> list[torch.Tensor]:
        """Values in the order (outputs read, batch leaves read); returns [loss] or [sum, count], then metrics."""
        if self.reads.writes:
            values = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
        read = dict(zip(self.reads.outputs, values, strict=False))
        outputs = {i: read[one] if one in read else Opaque(f"output {i}") for i, one in enumerate(self.reads.first)}
        fields = dict(zip(self.reads.batch, values[len(self.reads.outputs) :], strict=True))
        batch = replace(
            self.layout,
            lambda path, _: fields.get(path, Opaque(f"batch field {path!r}")),
            _no_tensor,
            whole=without_tensors,
        )
        value = self.loss(self.shape.unflatten(outputs), batch)
        loss, count = checked(value)
        metrics = tensors(without_metrics(value)[1], self.reads.metrics)
        return [loss, *metrics] if count is None else [loss, count, *metrics]
