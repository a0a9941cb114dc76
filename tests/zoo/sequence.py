"""Models over sequences: recurrent nets, a thrice used embedding, and a loss that is a sum and a count."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .dense import class_loss
from .entry import Arguments, Batch, Entry, built_by, drawn_by

FEATURES = 8
WIDTH = 12
CLASSES = 4
VOCABULARY = 23
LENGTHS = (5, 3, 4)
IGNORED = -100


def _series(generator: torch.Generator, rows: int, length: int) -> Batch:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randn(rows, length, FEATURES, generator=generator), labels


def _next_tokens(generator: torch.Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _masked_tokens(generator: torch.Generator, rows: int, length: int) -> Batch:
    tokens, labels = _next_tokens(generator, rows, length)
    kept = 1 + (torch.arange(rows).unsqueeze(1) * 2) % length
    return {"tokens": tokens, "labels": labels.masked_fill(torch.arange(length) >= kept, IGNORED)}


def _tokens_only(batch: dict[str, Tensor]) -> Arguments:
    return (batch["tokens"],), {}


def _token_loss(outputs: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), batch[-1].flatten())


def _masked_sum(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].flatten()
    total = functional.cross_entropy(outputs.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them; the head reads the last step's output."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.layers = kind(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Return rows x classes."""
        steps, _ = self.layers(self.enter(series).tanh())
        out: Tensor = self.head(self.middle(steps[:, -1]).relu())
        return out


def _gru() -> nn.Module:
    return Recurrent(nn.GRU)


def _lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


class TiedHead(nn.Module):
    """One matrix used three times: as embedding, as a soft dictionary in the middle, as output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return rows x length x vocabulary."""
        hidden = self.first(self.embedding(tokens)).relu()
        dictionary = self.embedding.weight
        hidden = hidden + functional.linear(hidden, dictionary).softmax(-1) @ dictionary
        out: Tensor = self.head(self.dropout(self.second(hidden).tanh()))
        return out


class Tokens(nn.Module):
    """Causal attention of one head and a small feed-forward net, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return rows x length x vocabulary."""
        hidden = self.embedding(tokens)
        query, key, value = self.mixed(hidden).chunk(3, dim=-1)
        hidden = self.norm(hidden + functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        out: Tensor = self.head(self.dropout(functional.gelu(self.wide(hidden))))
        return out


ENTRIES = (
    Entry("gru", built_by(_gru), drawn_by(_series, LENGTHS), class_loss, varies=True, specialises=True),
    Entry("lstm", built_by(_lstm), drawn_by(_series, LENGTHS), class_loss, varies=True, specialises=True),
    Entry("tied_head", built_by(TiedHead), drawn_by(_next_tokens, LENGTHS), _token_loss, tied=True, varies=True),
    Entry("token_mean", built_by(Tokens), drawn_by(_masked_tokens, LENGTHS), _masked_sum, _tokens_only, varies=True),
)
