"""Wide & Deep with one large table for both parts, which no device needs to hold whole (OneFlow, Sect. 6.3.2, Fig. 13).

The rows of the table are divided over the devices, and the layers have a part of the clicks on each, as
`wide_and_deep.toml` says. Give `S(1)` in place of `S(0)` to divide columns.

    roundelay train examples/wide_and_deep.py --signatures examples/wide_and_deep.toml --workers 1 --rule 1f1b
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundelay

VOCABULARY, FIELDS, WIDTH = 20_000, 8, 32
BATCHES, ROWS = 100, 256


class WideAndDeep(nn.Module):
    """From features (rows, FIELDS), and whether each row was clicked, to the loss."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, WIDTH)
        self.wide = nn.Linear(WIDTH, 1)  # of the sum over a row's features, as a weight for each feature would be
        self.deep = nn.Sequential(
            nn.Flatten(), nn.Linear(FIELDS * WIDTH, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, features: Tensor, clicked: Tensor) -> Tensor:
        found = self.table(features)
        scores = self.deep(found) + self.wide(found.sum(1))
        return F.binary_cross_entropy_with_logits(scores.squeeze(1), clicked)


def clicks(epoch: int, vocabulary: int = VOCABULARY) -> Iterator[tuple[Tensor, Tensor]]:
    """Made clicks, since none may be fetched: frequent features count, and one of two kinds is clicked."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(BATCHES):
        features = (torch.rand(ROWS, FIELDS, generator=generator) ** 4 * vocabulary).long()
        yield features, (features % 2).sum(1).gt(FIELDS // 2).float()


def job(seed: int) -> roundelay.Job:
    """The job."""
    return roundelay.Job(
        model=WideAndDeep(),
        inputs=lambda batch: (batch, {}),
        loss=lambda loss, batch: loss,
        batches=clicks,
        optimizer=lambda named: torch.optim.Adagrad(named, lr=0.05),
    )
