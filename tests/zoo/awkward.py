"""Models made to be awkward: many kinds of random operators, buffers that are read back, views and nested outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .dense import class_loss
from .entry import Arguments, Batch, Entry, built_by, drawn_by

FEATURES = 8
WIDTH = 12
CLASSES = 4
LENGTHS = (6, 4, 5)


def _features(generator: torch.Generator, rows: int, length: int) -> Batch:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randn(rows, FEATURES, generator=generator), labels


def _series(generator: torch.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randn(rows, length, FEATURES, generator=generator), labels


def _shifted(generator: torch.Generator, rows: int, length: int) -> Batch:
    series, labels = _series(generator, rows, length)
    return series, torch.randn(rows, WIDTH, generator=generator), labels


def _shift_by_name(batch: tuple[Tensor, ...]) -> Arguments:
    return (batch[0],), {"shift": batch[1]}


class DropoutHeavy(nn.Module):
    """Six kinds of random operators, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = functional.dropout(self.enter(features).relu(), 0.1, self.training)
        images = self.layers[0](hidden).view(-1, WIDTH // 4, 2, 2)
        hidden = functional.dropout2d(images, 0.1, self.training).flatten(1)
        hidden = functional.alpha_dropout(functional.selu(self.layers[1](hidden)), 0.1, self.training)
        hidden = functional.feature_alpha_dropout(functional.selu(self.layers[2](hidden)), 0.1, self.training)
        if self.training:
            hidden = hidden + 0.1 * torch.rand_like(hidden) + 0.1 * torch.randn(hidden.shape)
            hidden = hidden * torch.bernoulli(torch.full_like(hidden, 0.9))
        out: Tensor = self.head(self.layers[3](hidden).tanh())
        return out


class BufferReader(nn.Module):
    """Counts its forward passes and averages its activations; the outputs depend on both.

    The product with the bare buffer makes autograd keep the buffer itself for backward, so that a second forward pass
    before the first one's backward overwrites what that backward needs: plain torch then raises.
    """

    count: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = self.first(features).relu()
        if self.training:
            self.count.add_(1)
            self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        hidden = self.second(hidden - self.average) + hidden * self.average
        out: Tensor = self.head(self.dropout(hidden.tanh()))
        return out / (1 + 0.1 * self.count)


class Views(nn.Module):
    """Writes slices into a new tensor, takes tensors apart and together, and returns a tuple that holds a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor, *, shift: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Return ({"logits": rows x classes, "pair": (rows x width, rows x width)}, rows x length x width)."""
        hidden = self.enter(series)
        left, middle, right = self.mixed(hidden).chunk(3, dim=-1)
        low, high = left.split([WIDTH // 4, WIDTH - WIDTH // 4], dim=-1)
        woven = torch.zeros_like(hidden)
        woven[..., : WIDTH - WIDTH // 4] = high.tanh()
        woven[..., WIDTH - WIDTH // 4 :] = low * 2
        woven[:, 0] += shift
        stacked = self.dropout(torch.stack([woven, middle, right], dim=1))
        first, second, third = stacked.unbind(1)
        peak, _ = first.max(dim=1)
        best, _ = second.topk(2, dim=1)
        spread, mean = torch.var_mean(third.transpose(1, 2), dim=2)
        hidden = self.side(peak + best.sum(1)) + mean
        return {"logits": self.head(hidden), "pair": (hidden, spread)}, woven


def _views_loss(outputs: tuple[dict[str, Any], Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    named, woven = outputs
    hidden, spread = named["pair"]
    aside: Tensor = 0.1 * (hidden * spread).mean() + 0.01 * woven.square().mean()
    return class_loss(named["logits"], batch) + aside


ENTRIES = (
    Entry("dropout_heavy", built_by(DropoutHeavy), drawn_by(_features, LENGTHS), class_loss),
    Entry("buffer_reader", built_by(BufferReader), drawn_by(_features, LENGTHS), class_loss, buffers=True),
    Entry("views", built_by(Views), drawn_by(_shifted, LENGTHS), _views_loss, _shift_by_name, varies=True),
)
