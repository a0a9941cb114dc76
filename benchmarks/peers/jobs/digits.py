"""Handwritten digits by a wide perceptron: three stages that send each other 64 KiB for a micro-batch.

``RATE`` is the learning rate, ``SEED`` that of weights and order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import roundelay
from examples.digits import Batch, pictures

WIDTH, ROWS = 512, 32
CUTS = "relu,relu_1"
"""Of :func:`model`, into three stages with two or one linear layers each."""


def model() -> nn.Module:
    """Four linear layers."""
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 10))


def batches(seed: int, epoch: int) -> Iterator[Batch]:
    """All pictures once, in full batches, in an order that depends on seed and epoch."""
    pixels, digits = pictures()[0]
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    for rows in order.split(ROWS)[: len(digits) // ROWS]:
        yield pixels[rows], digits[rows]


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross entropy."""
    return functional.cross_entropy(outputs, batch[1])


def gradient_of(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient for one batch, as one row of numbers."""
    with torch.enable_grad():
        parameters = list(model.parameters())
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss(model(batch[0]), batch), parameters)])


def made(seed: int, rate: float, evaluate: roundelay.job.Evaluate | None = None) -> roundelay.Job:
    """The job, by plain stochastic gradient descent, as in the paper's analysis."""
    torch.manual_seed(seed)
    return roundelay.Job(
        model=model(),
        loss=loss,
        batches=lambda epoch: batches(seed, epoch),
        optimizer=lambda named: torch.optim.SGD(named, lr=rate),
        evaluate=evaluate,
    )


def job(seed: int) -> roundelay.Job:
    """The job of `roundelay host`."""
    own = int(os.environ.get("SEED", str(seed)))
    return made(own, float(os.environ.get("RATE", "0.2")))
