"""Twelve linear layers on a batch whose activations are much larger than the weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from roundelay import Job

WIDTH, ROWS = 512, 8192


def job(seed: int) -> Job:
    """Each layer with a ReLU."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(ROWS, WIDTH, generator=draws), torch.randint(10, (ROWS,), generator=draws)) for _ in range(4)
    ]
    hidden = [layer for _ in range(11) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return Job(
        model=nn.Sequential(*hidden, nn.Linear(WIDTH, 10)),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: batches,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
