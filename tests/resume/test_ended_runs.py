"""A run that goes on from one that has ended says so, where one run would have read older weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundelay
from roundelay.session.events import Drained, Event

CHOICES: dict[str, Any] = {"cuts": "equal", "check": "off"}


def job() -> roundelay.Job:
    torch.manual_seed(0)
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(12)]
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 3)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def losses(trained: Any) -> list[float]:
    return [update.loss for update in trained.updates]


@pytest.mark.parametrize(
    ("rule", "workers", "same"),
    [
        ("1f1b", 2, True),
        ("pipeoptim", 1, True),
        ("pipeoptim", 2, False),
        ("pipedream", 2, False),
        ("pipedream-2bw", 1, False),
    ],
)
def test_it_says_so_where_it_differs(rule: str, workers: int, same: bool, tmp_path: Path) -> None:
    run: dict[str, Any] = {"rule": rule, "workers": workers, **CHOICES}
    straight = losses(roundelay.train(job(), steps=12, **run))
    roundelay.train(job(), steps=6, save_to=tmp_path / "first", **run)
    told: list[Event] = []
    if same:
        second = roundelay.train(job(), steps=6, resume=tmp_path / "first", observers=[told.append], **run)
    else:
        with pytest.warns(roundelay.PlanWarning, match="had ended"):
            second = roundelay.train(job(), steps=6, resume=tmp_path / "first", observers=[told.append], **run)
    assert (losses(second) == straight[6:]) is same
    assert [event.micro_batches for event in told if isinstance(event, Drained)] == ([] if same else [0])
