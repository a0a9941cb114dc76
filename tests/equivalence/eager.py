"""What everybody writes: gradient accumulation over micro-batches on the person's own module, without Roundelay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from roundelay.frontend.batch import replace
from roundelay.job import Named
from tests.zoo import Batch, Entry, arguments, rows

RATES = ("dropout", "attention_dropout")
"""Attributes under which modules other than dropout layers keep a probability: recurrent layers, attention."""


@dataclass(slots=True)
class Eager:
    """What came of it: losses by micro-batch and by batch, and the model."""

    model: nn.Module
    micro_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def without_dropout(model: nn.Module) -> nn.Module:
    """The same model with every probability of dropping set to zero."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name in RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def masks_as_traced() -> AbstractContextManager[object]:
    """Hugging Face models make the mask of their attention, as they do while they are traced.

    Else they ask the kernel for a causal one, whose backward gives other last bits on some processors (AMD EPYC).
    """
    return mock.patch("transformers.masking_utils._ignore_causal_mask_sdpa", return_value=False)


def num_rows(batch: Batch) -> int:
    """Rows of a batch."""
    return next(iter(batch.values() if isinstance(batch, dict) else batch)).size(0)


def micro_batches(batch: Batch, count: int, least: int = 1) -> list[Batch]:
    """At most ``count`` micro-batches of ``least`` rows or more; sizes differ by at most one, larger ones first.

    Each in memory of its own: kernels may tell a view that begins elsewhere, and a stage gets none.
    """
    most = max(1, num_rows(batch) // least)
    sizes = [part.numel() for part in torch.arange(num_rows(batch)).tensor_split(min(count, most))]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [replace(rows(batch, end - size, end), _own) for size, end in zip(sizes, ends, strict=True)]


def _own(path: str, leaf: Tensor) -> Tensor:
    return leaf.clone()


def train(
    entry: Entry, model: nn.Module, batches: list[Batch], count: int, make: Callable[[Named], Optimizer]
) -> Eager:
    """One update per batch, of the gradients of ``count`` micro-batches."""
    done = Eager(model)
    optimizer = make(list(model.named_parameters()))
    for batch in batches:
        optimizer.zero_grad()
        with masks_as_traced():
            done.losses.append(_accumulate(entry, done, batch, count))
        optimizer.step()
    return done


def _accumulate(entry: Entry, done: Eager, batch: Batch, count: int) -> float:
    """Backward of every micro-batch; the batch's loss."""
    total, terms = 0.0, 0.0
    normalised = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in done.model.modules())
    for part in micro_batches(batch, count, 2 if normalised else 1):
        args, kwargs = arguments(entry, part)
        loss = entry.loss(done.model(*args, **kwargs), part)
        if isinstance(loss, tuple):
            seed, counted = loss
            share = 1.0
            terms += float(counted)
        else:
            seed, share = loss, num_rows(part) / num_rows(batch)
        (seed * share).backward()
        done.micro_losses.append(seed.item())
        total += seed.item() * share
    if terms:
        _divide(done.model, terms)
    return total / (terms or 1.0)


def _divide(model: nn.Module, terms: float) -> None:
    for parameter in model.parameters():
        if isinstance(parameter.grad, Tensor):
            parameter.grad /= terms
