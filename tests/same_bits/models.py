"""The small models, data and losses of the jobs; nothing here comes from Roundelay or from other tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 5
WIDTH = 8
FEATURES = 6
LENGTH = 4
IGNORED = -100

Batch = tuple[Tensor, Tensor]


class Deep(nn.Module):
    """Ten linear layers with dropout; the first layer's output skips all others, and one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        first = self.first(features)
        hidden = first
        for layer in self.layers:
            hidden = self.dropout(layer(hidden).tanh())
        hidden = functional.linear(hidden + first, self.get_parameter("layers.0.weight")).tanh()
        out: Tensor = self.head(self.dropout(hidden))
        return out


class Frozen(nn.Module):
    """Seven linear layers, of which three tensors do not train; one buffer counts the forwards in training."""

    forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.GroupNorm(2, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("forwards", torch.zeros(()))
        for name in ("first.weight", "layers.1.bias", "layers.3.weight"):
            self.get_parameter(name).requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = self.first(features)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        if self.training:
            self.forwards.add_(1.0)
        out: Tensor = self.head(self.norm(hidden))
        return out


class Block(nn.Module):
    """Convolution, BatchNorm and ReLU in place, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the shape of ``hidden``."""
        out: Tensor = self.relu(self.norm(self.convolution(hidden)))
        return out + hidden


class Convolutions(nn.Module):
    """A small ResNet-like net: running statistics, activations changed in place, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return rows x classes."""
        out: Tensor = self.head(self.dropout(self.blocks(self.stem(images)).mean((2, 3))))
        return out


class Attention(nn.Module):
    """Causal attention of two heads and a feed-forward net, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return rows x length x width."""
        heads = self.mixed(self.norm1(hidden)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = hidden + self.dropout(self.narrow(functional.gelu(self.wide(self.norm2(hidden)))))
        return out


class Transformer(nn.Module):
    """Two blocks of attention; the embedding is the head, too, and so travels between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return rows x length x classes."""
        hidden = self.embedding(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(self.norm(hidden))
        return out


class Lstm(nn.Module):
    """Six LSTM layers, each added to what it reads; the mean over all steps is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(6))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = self.enter(series)
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden)[0])
        out: Tensor = self.head(hidden.mean(1))
        return out


def _features(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, FEATURES, generator=generator), _labels(generator, rows)


def _series(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, LENGTH, FEATURES, generator=generator), _labels(generator, rows)


def _images(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 3, 5, 5, generator=generator), _labels(generator, rows)


def _labels(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randint(0, CLASSES, (rows,), generator=generator)


def _tokens(generator: torch.Generator, rows: int) -> Batch:
    """Tokens and the ones that follow them; of row i only the first so many are to be foretold."""
    drawn = torch.randint(0, CLASSES, (rows, LENGTH + 1), generator=generator)
    kept = 1 + (torch.arange(rows).unsqueeze(1) * 3) % LENGTH
    labels = drawn[:, 1:].masked_fill(torch.arange(LENGTH) >= kept, IGNORED)
    return drawn[:, :-1].contiguous(), labels


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its data.

    Args:
        build: makes the model; its numbers come from torch's default generator.
        draw: makes one batch of so many rows: what the model reads, and the labels.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], Batch]


MODELS = {
    "deep": Model(Deep, _features),
    "frozen": Model(Frozen, _features),
    "conv": Model(Convolutions, _images),
    "transformer": Model(Transformer, _tokens),
    "lstm": Model(Lstm, _series),
}


def mean(outputs: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy over the labels that count."""
    return functional.cross_entropy(outputs.flatten(0, -2), batch[-1].flatten())


def summed(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same as a sum, with the number of labels in it."""
    labels = batch[-1].flatten()
    return functional.cross_entropy(outputs.flatten(0, -2), labels, reduction="sum"), (labels != IGNORED).sum()


def told(outputs: Tensor, batch: Batch) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """The mean, and beside it two metrics: one is a mean, the other a sum with a count."""
    right = (outputs.argmax(-1) == batch[-1]).float()
    count = (batch[-1] != IGNORED).sum()
    return {"loss": mean(outputs, batch), "largest": outputs.abs().amax(-1).mean(), "right": (right.sum(), count)}


LOSSES: dict[str, Callable[[Tensor, Batch], object]] = {"mean": mean, "sum": summed, "metrics": told}
