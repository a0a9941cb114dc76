"""Fourteen equal blocks that compute for some 25 ms and hand on 64 KiB."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import roundelay

BLOCKS, WIDTH, INNER, ROWS = 14, 64, 6144, 256

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    """The blocks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(BLOCKS)]
    )


def batch() -> Batch:
    """One batch."""
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(outputs, batch[1])


def job(seed: int) -> roundelay.Job:
    """The job."""
    data = [batch()] * 10_000
    return roundelay.Job(
        model=model(), loss=loss, batches=lambda epoch: data, optimizer=lambda named: torch.optim.SGD(named, lr=1e-3)
    )
