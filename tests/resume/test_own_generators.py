"""A run over a DataLoader with a generator of its own, kept over the epochs, continues bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import roundelay


def loader() -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 6, generator=draws), torch.randint(3, (40,), generator=draws))
    return DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))


def returned() -> Any:
    own = loader()
    return lambda epoch: own


def generator_function() -> Any:
    own = loader()

    def batches(epoch: int) -> Iterator[Any]:
        yield from own

    return batches


def through_a_helper() -> Any:
    own = loader()

    def rows() -> Iterator[Any]:
        for x, y in own:
            yield x * 2, y

    def batches(epoch: int) -> Iterator[Any]:
        yield from rows()

    return batches


class Data:
    """Holds the loader."""

    def __init__(self) -> None:
        self.loaders = {"train": loader()}

    def batches(self, epoch: int) -> Iterator[Any]:
        yield from self.loaders["train"]

    __call__ = batches


def given(own: Any, epoch: int) -> Iterator[Any]:
    yield from own


WAYS: dict[str, Callable[[], Any]] = {
    "returned": returned,
    "generator function": generator_function,
    "helper": through_a_helper,
    "method": lambda: Data().batches,
    "object": Data,
    "partial": lambda: partial(given, loader()),
}


def job(way: str) -> roundelay.Job:
    torch.manual_seed(0)
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=WAYS[way](),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )


@pytest.mark.parametrize("way", WAYS)
def test_it_continues_bit_for_bit(way: str, tmp_path: Path) -> None:
    choices: dict[str, Any] = {"workers": 2, "micro_batches": 2, "cuts": "equal"}
    straight, second = job(way), job(way)  # planning opens the first epoch, so that the next would be the second
    losses = [update.loss for update in roundelay.train(straight, steps=17, **choices).updates]
    assert len({*losses[:5]} & {*losses[5:10]}) == 0  # another order in the next epoch
    roundelay.train(job(way), steps=12, save_to=tmp_path / "first", **choices)
    again = roundelay.train(second, steps=5, resume=tmp_path / "first", **choices)
    assert [update.loss for update in again.updates] == losses[12:]
    for one, other in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
