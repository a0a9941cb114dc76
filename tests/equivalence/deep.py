"""What the table of rules runs: a model that eight stages can share, and rules as a person registers them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay.ir.rule import Fresh, UpdateRule
from tests.equivalence.cells import VARIANTS, Variant
from tests.zoo.dense import class_loss
from tests.zoo.entry import Batch, Entry, built_by

ROWS = (10, 10, 5, 10, 10, 4, 10, 10, 10, 3, 10, 10)
"""Of every batch; of some M = 8 makes fewer than M micro-batches."""

FEATURES, WIDTH, CLASSES = 6, 8, 3


class Deep(nn.Module):
    """Ten layers, so that eight stages have something each; dropout, a skip and a tied weight over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        first = self.first(features)
        hidden = first
        for layer in self.layers:
            hidden = self.dropout(layer(hidden).tanh())
        hidden = functional.linear(hidden + first, self.layers[0].weight).tanh()
        out: Tensor = self.head(self.dropout(hidden))
        return out


def batches(seed: int, num: int, *, short: bool = False, varying: bool = False) -> list[Batch]:
    """Batches of :data:`ROWS`, short ones among them in any case."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, FEATURES, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator))
        for rows in ROWS[:num]
    ]


DEEP = Entry("deep", built_by(Deep), batches, class_loss)


def only_the_last(i: int, j: int, stages: int) -> bool:
    return j == stages


def every_other_on_the_last(i: int, j: int, stages: int) -> bool:
    return j == stages and i % 2 == 1


def own_rule(name: str, fresh: Fresh) -> UpdateRule:
    """A rule of the general form, as a person registers it."""
    return UpdateRule(
        name=name,
        schedule="async-1f1b",
        predicts=False,
        stashes=True,
        modes=("stash",),
        source="a test",
        versions="table",
        fresh=fresh,
    )


OWN = (own_rule("own-last", only_the_last), own_rule("own-odd", every_other_on_the_last))
"""Rules u(i, j) of a person's own: W[t] or W[t-1], as a table says."""

LINES = VARIANTS | {rule.name: Variant(rule.name, "none", "stash") for rule in OWN}
"""Every rule with every predictor and backward mode that it allows."""
