"""Models of which the zoo has none: those that hold or make tensors, and attention of several heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.dense import class_loss
from tests.zoo.entry import Batch, Entry, built_by, drawn_by

FEATURES, WIDTH, HEADS, CLASSES, LENGTH = 6, 12, 3, 4, 5


def _features(generator: torch.Generator, rows: int, length: int) -> Batch:
    return torch.randn(rows, FEATURES, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def _series(generator: torch.Generator, rows: int, length: int) -> Batch:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randn(rows, length, FEATURES, generator=generator), labels


class Constants(nn.Module):
    """Reads a tensor that is neither parameter nor buffer, and makes others that name no device."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.head = (
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.scale = torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = self.enter(features).tanh() * self.scale
        hidden = self.middle(hidden + 0.1 * torch.arange(WIDTH)).relu() * torch.tensor([1.0, 2.0, 0.5] * (WIDTH // 3))
        kept = torch.ones(WIDTH, WIDTH).triu() + torch.zeros(WIDTH, WIDTH).fill_diagonal_(0.5)
        out: Tensor = self.head(hidden @ kept)
        return out


class Attention(nn.Module):
    """Causal attention as small GPTs write it. On the CPU ``contiguous`` does nothing, and is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mixed = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.leave, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = self.enter(series)
        rows, length, width = hidden.shape
        apart = (x.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for x in self.mixed(hidden).chunk(3, -1))
        query, key, value = apart
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.leave(attended.transpose(1, 2).contiguous().view(rows, length, width))
        out: Tensor = self.head(hidden.mean(1))
        return out


class Encoder(nn.Module):
    """Two of torch's own layers with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, series: Tensor) -> Tensor:
        """Return rows x classes."""
        hidden = self.enter(series)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask)
        out: Tensor = self.head(hidden.mean(1))
        return out


ENTRIES = (
    Entry("constants", built_by(Constants), drawn_by(_features, (0,)), class_loss, draws=False),
    Entry("attention", built_by(Attention), drawn_by(_series, (LENGTH,)), class_loss, draws=False),
    Entry("encoder", built_by(Encoder), drawn_by(_series, (LENGTH,)), class_loss, draws=False),
)
OWN: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}
