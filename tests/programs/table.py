"""Ordinary programs, each with what must come of it: the training that plain PyTorch does, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay import Job

Batch = tuple[Tensor, Tensor]
Make = Callable[[], Job]


@dataclass(frozen=True)
class Program:
    """One program.

    Args:
        make: makes its job; the same at every call behind the same seed.
        refused: a regular expression for the refusal's text; None: it trains.
        draws: it draws random numbers, which are keyed by design: compared under the original operators alone.
        rounding: the last bits differ, as sums are taken in another order.
    """

    make: Make
    refused: str | None = None
    draws: bool = False
    rounding: bool = False


PROGRAMS: dict[str, Program] = {}


def _note(program: Program) -> Make:
    make = program.make
    name = f"{make.__module__.rsplit('.', 1)[-1]}.{make.__name__}"
    assert name not in PROGRAMS, name
    PROGRAMS[name] = program
    return make


def trains(make: Make) -> Make:
    """It must train as in plain PyTorch."""
    return _note(Program(make))


def trains_with_draws(make: Make) -> Make:
    """It must train as in plain PyTorch, but for the numbers that are drawn."""
    return _note(Program(make, draws=True))


def trains_but_for_rounding(make: Make) -> Make:
    """It must train as in plain PyTorch up to rounding."""
    return _note(Program(make, rounding=True))


def refused(text: str) -> Callable[[Make], Make]:
    """It must be refused with a text like this."""

    def note(make: Make) -> Make:
        return _note(Program(make, text))

    return note


def batches(
    width: int = 8, rows: int = 8, count: int = 6, classes: int = 4, words: int = 0, seed: int = 7
) -> list[Batch]:
    """Batches of (x, labels): numbers, or words if there are any."""
    draws = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        x = torch.randint(words, (rows, width), generator=draws) if words else torch.randn(rows, width, generator=draws)
        made.append((x, torch.randint(classes, (rows,), generator=draws)))
    return made


def entropy(outputs: Any, batch: Any) -> Tensor:
    """Cross entropy of the labels."""
    return functional.cross_entropy(outputs, batch[1])


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum, over what is trained."""
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1, momentum=0.9)


def job(model: nn.Module, loss: Any = entropy, data: Any = None, optimizer: Any = sgd, **rest: Any) -> Job:
    """A job over a list of batches."""
    data = data or batches()
    return Job(model=model, loss=loss, batches=lambda epoch: data, optimizer=optimizer, **rest)


class Body(nn.Module):
    """Three layers, from 8 numbers to 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def first(self, x: Tensor) -> Tensor:
        """The first layer."""
        return torch.relu(self.a(x))

    def rest(self, h: Tensor) -> Tensor:
        """The others."""
        return self.c(torch.relu(self.b(h)))

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        return self.rest(self.first(x))
