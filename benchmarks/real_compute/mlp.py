"""A job: six linear layers of width 1,024 on batches of 128 rows."""

import torch
from torch import nn
from torch.nn import functional as F

import roundelay

WIDTH, ROWS, LAYERS = 1024, 128, 6


def job(seed: int) -> roundelay.Job:
    """Fixed random data."""
    data = [(torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))) for _ in range(20)] * 50  # no checkpoint in between
    hidden = [layer for _ in range(LAYERS - 1) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return roundelay.Job(
        model=nn.Sequential(*hidden, nn.Linear(WIDTH, 10)),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
        steps=60,
    )
