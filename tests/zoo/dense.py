"""Fully connected models: the plain chain, several inputs, a skip over all stages, frozen layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .entry import Batch, Entry, built_by, drawn_by

WIDTH = 16
FEATURES = 12
CLASSES = 5
FIXED = (FEATURES,)


def class_loss(outputs: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy of `outputs` (rows x classes) against the last tensor of `batch`."""
    return functional.cross_entropy(outputs, batch[-1])


def _features(generator: torch.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randn(rows, length, generator=generator), labels


def _pairs(generator: torch.Generator, rows: int, length: int) -> Batch:
    left, labels = _features(generator, rows, length)
    return left, torch.randn(rows, WIDTH, generator=generator), labels


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )


class TwoInputs(nn.Module):
    """Two towers whose outputs meet twice: concatenated, and the second again by the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(FEATURES, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.joint = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return rows x classes."""
        joint = self.joint(torch.cat([self.left(left).tanh(), self.right(right).tanh()], dim=1))
        out: Tensor = self.head(self.dropout(joint.relu()) * right)
        return out


class Skip(nn.Module):
    """The first layer's output is added right before the last layer: it passes every stage in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        first = self.first(features)
        hidden = first
        for layer in self.middle:
            hidden = self.dropout(layer(hidden).relu())
        out: Tensor = self.last(hidden + first)
        return out


def _frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    )
    model[0].requires_grad_(False)
    model[4].requires_grad_(False)
    return model


ENTRIES = (
    Entry("mlp", built_by(_mlp), drawn_by(_features, FIXED), class_loss),
    Entry("two_inputs", built_by(TwoInputs), drawn_by(_pairs, FIXED), class_loss),
    Entry("skip", built_by(Skip), drawn_by(_features, FIXED), class_loss),
    Entry("frozen", built_by(_frozen), drawn_by(_features, FIXED), class_loss),
)
