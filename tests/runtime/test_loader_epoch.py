"""Planning looks at the first batches and uses none up: training gets the data that plain PyTorch would get."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, Sampler

import roundelay
from roundelay.errors import JobError, UserCodeError
from roundelay.job import Job
from roundelay.proof.plain_baseline import measure
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.loading.loader_probe import reading_s

Batch = tuple[torch.Tensor, torch.Tensor]
STEPS = 16


def batch_of(number: int) -> Batch:
    """Other rows for every number."""
    rows = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=rows), torch.randint(3, (4,), generator=rows)


LISTED = [batch_of(number) for number in range(24)]


def job(batches: Callable[[int], Any]) -> Job:
    """Two layers on rows of six."""
    torch.manual_seed(0)
    return Job(
        model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=batches,
        optimizer=partial(SGD, lr=0.05),
    )


def losses(batches: Callable[[int], Any], transport: str = "memory", steps: int = STEPS) -> list[float]:
    """What is trained on, as the losses show it; planned with a measurement of stages and loader."""
    made = job(batches)
    plan = roundelay.plan(made, workers=2, rule="1f1b", micro_batches=1, transport=transport)
    assert plan.read_s > 0
    return [update.loss for update in roundelay.train(made, plan=plan, steps=steps).updates]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Of the list, one after the other."""
    return losses(lambda epoch: LISTED)


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_a_stream_that_can_be_read_only_once_is_trained_on_from_its_beginning(
    transport: str, expected: list[float]
) -> None:
    once = iter(LISTED)
    assert losses(lambda epoch: once, transport) == expected


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_stream_that_goes_on_at_every_call_loses_nothing(transport: str, expected: list[float]) -> None:
    stream = iter(LISTED)
    assert losses(lambda epoch: itertools.islice(stream, 20), transport) == expected


def lines(path: Path, epoch: int) -> Iterator[Batch]:
    """From a file that is open meanwhile; what two processes share of it is where it is read next."""
    with path.open() as file:
        for line in file:
            yield batch_of(int(line))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A line for each batch, too many for one read of a buffer."""
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:>4000}\n" for number in range(24)))
    return path


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_file_that_is_open_is_read_on_and_again_for_the_reference(
    transport: str, file: Path, expected: list[float]
) -> None:
    assert losses(partial(lines, file), transport) == expected
    made = job(partial(lines, file))
    plan = roundelay.plan(made, workers=2, rule="pipedream", transport=transport, cuts="equal")
    assert measure(made, 0, 1) is not None  # beside the run, in a process of its own, as the command does
    result = roundelay.verify(made, plan=plan, steps=STEPS)
    assert result.equal, result.difference


def rows_of(path: Path, epoch: int) -> Iterator[Batch]:
    """From a database whose connection is bound to the thread that has opened it."""
    connection = sqlite3.connect(path)
    for (number,) in connection.execute("select n from t order by n"):
        yield batch_of(number)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_what_is_bound_to_its_thread_is_opened_again(transport: str, tmp_path: Path, expected: list[float]) -> None:
    path = tmp_path / "data.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (n integer)")
        connection.executemany("insert into t values (?)", [(number,) for number in range(24)])
    connection.close()
    assert losses(partial(rows_of, path), transport) == expected


class Passes(Sampler[list[int]]):
    """Another order at each pass, of which it keeps count itself."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.passes)).tolist()
        yield from ([index] for index in order)


class Rows(Dataset[Batch]):
    """One row for each number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Batch:
        x, y = batch_of(index)
        return x[0], y[0]


def test_a_sampler_that_counts_its_passes_makes_one_for_each_epoch() -> None:
    def reference() -> list[torch.Tensor]:
        loader = DataLoader(Rows(), batch_sampler=Passes())
        return [x for _ in range(2) for x, _ in loader]

    sampler = Passes()
    made = job(lambda epoch: DataLoader(Rows(), batch_sampler=sampler))
    roundelay.plan(made, workers=1, rule="1f1b", micro_batches=1)
    assert sampler.passes == 1
    seen = [batch[0] for batch in read_batches(made.batches, 0, Extent(epochs=2))]
    assert sampler.passes == 2
    assert all(torch.equal(a, b) for a, b in zip(seen, reference(), strict=True))


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_loader_that_fails_while_it_is_looked_at_fails_at_the_same_batch_in_the_run(transport: str) -> None:
    def fails(epoch: int) -> Iterator[Batch]:
        yield from LISTED[:3]
        raise ValueError("no fourth")

    made = job(fails)
    plan = roundelay.plan(made, workers=2, rule="1f1b", micro_batches=1, transport=transport)
    with pytest.raises(UserCodeError, match=r"batch 3 of batches\(0\).*no fourth"):
        roundelay.train(made, plan=plan, epochs=1)


def test_a_second_pass_over_what_was_read_is_refused_in_words() -> None:
    once = iter(LISTED)
    made = job(lambda epoch: once)
    plan = roundelay.plan(made, workers=2, rule="1f1b", cuts="equal")
    with pytest.raises(JobError, match=r"batches\(1\): got the same list_iterator as before"):
        roundelay.train(made, plan=plan, epochs=2)
    with pytest.raises(JobError, match="read only once"):
        roundelay.train(made, plan=plan, steps=1)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_data_that_are_others_at_the_second_time_cannot_be_verified(transport: str) -> None:
    stream = iter(LISTED)
    made = job(lambda epoch: itertools.islice(stream, 12))
    plan = roundelay.plan(made, workers=2, rule="1f1b", transport=transport, cuts="equal")
    with pytest.raises(JobError, match="another first batch than the run read"):
        roundelay.verify(made, plan=plan, steps=3)


def test_another_seed_is_another_look() -> None:
    made = job(lambda epoch: [(torch.rand(4, 6), torch.zeros(4, dtype=torch.long)) for _ in range(3)])
    firsts = [next(read_batches(made.batches, seed, Extent(epochs=1)))[0] for seed in (0, 1, 0)]
    assert torch.equal(firsts[0], firsts[2])
    assert not torch.equal(firsts[0], firsts[1])


def test_what_is_looked_at_is_bounded() -> None:
    asked: list[int] = []

    def large(epoch: int) -> Iterator[Batch]:
        for number in range(8):
            asked.append(number)
            yield torch.zeros(4_000_000, 6)[:, :6], torch.zeros(4_000_000, dtype=torch.long)

    reading_s(job(large).batches, 0, 1)
    assert len(asked) <= 3
