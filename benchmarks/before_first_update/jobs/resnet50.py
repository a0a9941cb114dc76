"""ResNet-50 on 64 images of 224 x 224."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.networks.resnet import resnet
from roundelay import Job


def job(seed: int) -> Job:
    """1000 classes."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(64, 3, 224, 224, generator=draws), torch.randint(1000, (64,), generator=draws)) for _ in range(4)
    ]
    return Job(
        model=resnet(50, 1000),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: batches,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
    )
