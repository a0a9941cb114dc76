"""Convolutional models: activations changed in place, and statistics that a forward pass changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dense import class_loss
from .entry import Batch, Entry, built_by, drawn_by

COLOURS = 3
CHANNELS = 6
CLASSES = 4
SIDES = (6, 4, 5)


def _images(generator: torch.Generator, rows: int, length: int) -> Batch:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randn(rows, COLOURS, length, length, generator=generator), labels


def _convolution(inputs: int, outputs: int, *, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)


class InplaceBlock(nn.Module):
    """Residual block that writes its activations over one another: relu_, +=, mul_, relu_."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _convolution(CHANNELS, CHANNELS, bias=True)
        self.second = _convolution(CHANNELS, CHANNELS, bias=True)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the shape of `hidden`."""
        out: Tensor = self.second(self.relu(self.first(hidden)))
        out += hidden
        out.mul_(0.9)
        out = self.relu(out)
        return out


class InplaceRelu(nn.Module):
    """Convolutional net in which every activation between the layers is overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(COLOURS, CHANNELS, bias=True), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(InplaceBlock(), InplaceBlock())
        self.dropout = nn.Dropout(0.2, inplace=True)
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return rows x classes."""
        pooled = self.blocks(self.stem(images)).mean((2, 3))
        pooled -= 0.1
        out: Tensor = self.head(self.dropout(pooled))
        return out


class NormalBlock(nn.Module):
    """Residual block of ResNet's first kind: convolution, BatchNorm, ReLU, twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = _convolution(outputs, outputs, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.across = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return rows x outputs x height x width."""
        out: Tensor = self.norm1(self.first(hidden)).relu()
        out = self.norm2(self.second(out)) + self.across(hidden)
        return out.relu()


class BatchNorm(nn.Module):
    """Small ResNet-like net with BatchNorm2d."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(COLOURS, CHANNELS, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU())
        self.blocks = nn.Sequential(NormalBlock(CHANNELS, CHANNELS), NormalBlock(CHANNELS, 2 * CHANNELS))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * CHANNELS, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = self.blocks(self.stem(images))
        out: Tensor = self.head(self.dropout(hidden.mean((2, 3))))
        return out


ENTRIES = (
    Entry("inplace_relu", built_by(InplaceRelu), drawn_by(_images, SIDES), class_loss, varies=True),
    Entry("batchnorm", built_by(BatchNorm), drawn_by(_images, SIDES), class_loss, buffers=True, varies=True),
)
