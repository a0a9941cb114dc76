"""Small jobs for the tests of the library's face."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from roundelay.job import Job

Batch = tuple[Tensor, Tensor]


def mlp(seed: int = 0) -> nn.Module:
    """Buffers, random numbers and enough pieces for four stages."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.Dropout(0.2),
        nn.Tanh(),
        nn.Linear(12, 12),
        nn.GELU(),
        nn.Linear(12, 3),
    )


class Tied(nn.Module):
    """The first layer's weight is also the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows x 7."""
        logits: Tensor = self.head(self.middle(self.embed(tokens)))
        return logits


class Noisy(Dataset[Batch]):
    """Every row is changed at random, by each of the three generators, as transforms do."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Batch:
        x = torch.full((6,), float(index)) / 40
        x = x + 0.1 * torch.randn(6) + float(np.random.rand()) + random.random()
        return x, torch.tensor(index % 3)


def loader(epoch: int) -> DataLoader[Batch]:
    """Five batches of eight rows, shuffled."""
    return DataLoader(Noisy(), batch_size=8, shuffle=True)


def tokens(epoch: int) -> Iterator[Batch]:
    """Four batches of six tokens."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        row = torch.randint(0, 7, (6,), generator=generator)
        yield row, (row + 1) % 7


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return functional.cross_entropy(outputs, batch[-1])


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two groups, so that their structure is put to use."""
    biases = [(n, p) for n, p in named if n.endswith("bias")]
    others = [(n, p) for n, p in named if not n.endswith("bias")]
    return torch.optim.AdamW([{"params": others, "lr": 1e-2}, {"params": biases, "weight_decay": 0.0}], lr=5e-3)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate changes with every update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.9**update)


def make(model: nn.Module | None = None, **changes: Any) -> Job:
    """A job on noisy rows, with fields replaced."""
    fields: dict[str, Any] = {"loss": loss, "batches": loader, "optimizer": adam, "scheduler": decay}
    return Job(model=mlp() if model is None else model, **(fields | changes))
