"""A small perceptron learns the handwritten digits of scikit-learn: seconds a run, so that rules can be compared.

    pip install scikit-learn
    roundelay compare examples/digits.py --workers 4 --time-to loss=0.2

The data come with scikit-learn: 1797 pictures of 8 x 8 pixels. Every fifth is held out. `evaluate` tells the share of
these that is recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import roundelay

WIDTH, ROWS, EPOCHS = 64, 32, 10
LEARNING_RATE, MOMENTUM = 0.02, 0.9

Batch = tuple[Tensor, Tensor]


@cache
def pictures() -> tuple[Batch, Batch]:
    """Pixels between 0 and 1 (pictures, 64) and digits (pictures): those to train on, and those held out."""
    x, y = load_digits(return_X_y=True)
    pixels, digits = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
    held_out = torch.arange(len(digits)) % 5 == 0
    return (pixels[~held_out], digits[~held_out]), (pixels[held_out], digits[held_out])


def batches(seed: int, epoch: int) -> Iterator[Batch]:
    """All pictures once, in full batches, in an order that depends on seed and epoch."""
    pixels, digits = pictures()[0]
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))
    for rows in order.split(ROWS)[: len(digits) // ROWS]:
        yield pixels[rows], digits[rows]


def model() -> nn.Module:
    """Four layers: one for each of four stages."""
    return nn.Sequential(
        nn.Linear(64, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """The share of the pictures held out that is recognised."""
    pixels, digits = pictures()[1]
    return {"accuracy": float((model(pixels).argmax(1) == digits).float().mean())}


def job(seed: int) -> roundelay.Job:
    """The job. Roundelay has seeded torch with `seed`, so the model starts the same under every rule."""
    return roundelay.Job(
        model=model(),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: batches(seed, epoch),
        optimizer=lambda named: torch.optim.SGD(named, lr=LEARNING_RATE, momentum=MOMENTUM),
        evaluate=evaluate,
        steps=EPOCHS * (len(pictures()[0][1]) // ROWS),
    )
