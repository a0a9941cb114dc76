"""Character text: the next character of Python's own standard library, from the characters before it.

Text and alphabet are those of ``examples/char_gpt.py``; the network is a residual perceptron over a short context, so
that a run takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundelay
from examples.char_gpt import ALPHABET, texts
from roundelay.job import OptimizerFactory

CONTEXT, EMBEDDING, WIDTH, BLOCKS = 12, 16, 96, 4
ROWS, UPDATES = 128, 100  # of a batch; in an epoch
HELD_OUT = 4000

Batch = tuple[Tensor, Tensor]


def draw(text: Tensor, starts: Tensor) -> Batch:
    """Contexts (rows, CONTEXT) that begin at `starts`, and the characters behind them (rows)."""
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


def batches(seed: int, epoch: int) -> Iterator[Batch]:
    """UPDATES batches of contexts drawn at random."""
    text = texts()[0]
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch)
    for _ in range(UPDATES):
        yield draw(text, torch.randint(len(text) - CONTEXT, (ROWS,), generator=generator))


class Block(nn.Module):
    """A perceptron with a way past it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        return x + self.inner(x)


def model() -> nn.Module:
    """Contexts to logits (rows, characters)."""
    return nn.Sequential(
        nn.Embedding(len(ALPHABET), EMBEDDING),
        nn.Flatten(),
        nn.Linear(CONTEXT * EMBEDDING, WIDTH),
        *(Block() for _ in range(BLOCKS)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, len(ALPHABET)),
    )


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """The share of held-out characters that is said first, and bits per character."""
    text = texts()[1]
    contexts, following = draw(text, torch.linspace(0, len(text) - CONTEXT - 1, HELD_OUT).long())
    logits = model(contexts)
    bits = float(F.cross_entropy(logits, following)) / math.log(2)
    return {"accuracy": float((logits.argmax(1) == following).float().mean()), "bits_per_char": bits}


def job(seed: int, optimizer: OptimizerFactory) -> roundelay.Job:
    """The job."""
    return roundelay.Job(
        model=model(),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: batches(seed, epoch),
        optimizer=optimizer,
        evaluate=evaluate,
    )
