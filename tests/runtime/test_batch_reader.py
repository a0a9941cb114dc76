"""The reader: where epochs and runs end, what a continued run skips, and whose random numbers the loader draws."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from roundelay.errors import JobError, UserCodeError
from roundelay.runtime.loading import loader_probe
from roundelay.runtime.loading.batch_reader import read_batches, read_micro_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.loading.loader_probe import first_batch, reading_s

Batch = dict[str, torch.Tensor]


def numbered(rows: tuple[int, ...] = (4, 4, 3)) -> Any:
    """Epochs of three batches whose rows hold (epoch, batch)."""

    def batches(epoch: int) -> Iterator[Batch]:
        for number, count in enumerate(rows):
            yield {"x": torch.tensor([[epoch, number]] * count)}

    return batches


def headers(extent: Extent, micro_batches: int = 1, batches: Any = None) -> list[Any]:
    """(batch, epoch, ends the epoch, final, the first row) of every micro-batch."""
    stream = read_micro_batches(batches or numbered(), 0, micro_batches, extent, lambda part: part)
    return [(h.batch, h.epoch, h.ends_epoch, h.final, values["x"][0].tolist()) for ((h, values),) in stream]


def test_the_last_batch_of_an_epoch_and_of_the_run_are_marked() -> None:
    assert headers(Extent(epochs=2)) == [
        (0, 0, 0, 0, [0, 0]),
        (1, 0, 0, 0, [0, 1]),
        (2, 0, 1, 0, [0, 2]),
        (3, 1, 0, 0, [1, 0]),
        (4, 1, 0, 0, [1, 1]),
        (5, 1, 1, 1, [1, 2]),
    ]
    assert headers(Extent(batches=2))[-1] == (1, 0, 0, 1, [0, 1])
    assert headers(Extent(batches=3))[-1] == (2, 0, 1, 1, [0, 2])  # it ends the epoch too, though nobody looks further


def test_a_run_of_whole_epochs_does_not_ask_for_one_more() -> None:
    asked: list[int] = []

    def batches(epoch: int) -> Any:
        asked.append(epoch)
        return numbered()(epoch)

    for extent in (Extent(epochs=2), Extent(batches=6)):
        asked.clear()
        assert len(headers(extent, batches=batches)) == 6
        assert asked == [0, 1]


def test_only_the_micro_batches_of_the_last_batch_are_final() -> None:
    found = headers(Extent(epochs=1), micro_batches=2)
    assert [final for *_, final, _ in found] == [0, 0, 0, 0, 1, 1]
    assert [ends for _, _, ends, _, _ in found] == [0, 0, 0, 0, 1, 1]


def test_a_continued_run_skips_what_was_used_in_its_first_epoch_only() -> None:
    extent = Extent(start_g=5, start_batch=5, start_epoch=1, skip=2, batches=3)
    assert headers(extent) == [(5, 1, 1, 0, [1, 2]), (6, 2, 0, 0, [2, 0]), (7, 2, 0, 1, [2, 1])]


def test_an_epoch_without_batches_and_one_that_is_used_up_are_told() -> None:
    with pytest.raises(JobError, match=r"batches\(0\).*no batch"):
        headers(Extent(epochs=1), batches=lambda epoch: [])
    with pytest.raises(JobError, match="after the 3 that were used"):
        headers(Extent(start_epoch=1, skip=3, epochs=2))
    assert headers(Extent(start_epoch=1, skip=3, batches=1))[0][4] == [2, 0]


def test_an_error_of_the_loader_names_the_batch() -> None:
    def batches(epoch: int) -> Iterator[Batch]:
        yield from list(numbered()(epoch))[:2]
        raise OSError("disk")

    with pytest.raises(UserCodeError, match=r"batch 2 of batches\(0\).*disk"):
        headers(Extent(epochs=1), batches=batches)


def test_closing_the_stream_closes_the_loader() -> None:
    closed = []

    def batches(epoch: int) -> Iterator[Batch]:
        try:
            yield from numbered()(epoch)
        finally:
            closed.append(epoch)

    stream = read_micro_batches(batches, 0, 1, Extent(batches=9), lambda part: part)
    next(stream)
    assert not closed
    stream.close()
    assert closed == [0]
    first_batch(batches, 0)
    assert closed == [0, 0]


def draws(epoch: int) -> Iterator[Batch]:
    """Numbers of all three generators."""
    for _ in range(3):
        yield {"x": torch.tensor([[torch.rand(()).item(), np.random.rand(), random.random()]])}


def test_the_loader_draws_by_seed_and_epoch_and_touches_nobody_elses_numbers() -> None:
    def data(seed: int, disturb: bool) -> list[list[float]]:
        found = []
        for batch in read_batches(draws, seed, Extent(epochs=2)):
            found.append(batch["x"][0].tolist())
            if disturb:
                torch.rand(1), np.random.rand(), random.random()
        return found

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    quiet = data(0, disturb=False)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    assert data(0, disturb=True) == quiet
    assert len({tuple(row) for row in quiet}) == 6
    other = data(1, disturb=False)
    assert not {row[k] for row in quiet for k in range(3)} & {row[k] for row in other for k in range(3)}
    late = [b["x"][0].tolist() for b in read_batches(draws, 0, Extent(start_epoch=1, skip=1, epochs=2))]
    assert late == quiet[4:]


def test_a_loader_may_fill_its_own_array_again() -> None:
    own = np.zeros((4, 1))

    def batches(epoch: int) -> Iterator[Any]:
        for number in range(3):
            own[:] = number
            yield {"x": torch.zeros(4, 1), "array": own}

    parts = [values for ((_, values),) in read_micro_batches(batches, 0, 1, Extent(epochs=1), lambda part: part)]
    assert [part["array"][0, 0] for part in parts] == [0.0, 1.0, 2.0]  # type: ignore[index]


# --- how long it takes


def taking(seconds: list[float], epoch: int) -> Iterator[Batch]:
    """Batches of four rows, each after so many seconds."""
    for each in seconds:
        time.sleep(each)
        yield {"x": torch.zeros(4, 1)}


def test_the_first_batch_does_not_count_and_the_others_are_shared_out_to_micro_batches() -> None:
    found = reading_s(partial(taking, [1.2, 0.02, 0.04, 0.02, 0.04]), 0, 2)
    assert 0.015 <= found < 0.1


def test_no_more_is_read_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def batches(epoch: int) -> Iterator[Batch]:
        for number in range(100):
            asked.append(number)
            yield {"x": torch.zeros(4, 1)}

    monkeypatch.setattr(loader_probe, "BUDGET_S", 60.0)
    assert reading_s(batches, 0, 1) > 0
    assert asked == list(range(1 + loader_probe.MEASURED))
    monkeypatch.setattr(loader_probe, "BUDGET_S", 0.0)
    asked.clear()
    assert reading_s(batches, 0, 1) > 0
    assert asked == [0, 1]


def test_it_is_not_known_where_there_is_no_second_batch_or_it_cannot_be_had() -> None:
    def failing(epoch: int) -> Iterator[Batch]:
        yield {"x": torch.zeros(4, 1)}
        raise OSError("disk")

    assert reading_s(partial(taking, [0.0]), 0, 2) == 0.0
    assert reading_s(failing, 0, 2) == 0.0
    state = torch.random.get_rng_state()
    reading_s(draws, 0, 1)
    assert torch.equal(torch.random.get_rng_state(), state)


# --- replicas


@pytest.mark.parametrize(
    ("rows", "micro_batches", "replicas", "dealt"),
    [
        (6, 1, 2, [[(0, 3), (1, 3)]]),
        (6, 2, 2, [[(0, 2), (1, 2)], [(2, 1), (3, 1)]]),
        (3, 2, 2, [[(0, 1), (1, 1)], [(2, 1), (3, 0)]]),
        (1, 2, 3, [[(0, 1), (1, 0), (2, 0)]]),
        (7, 1, 3, [[(0, 3), (1, 2), (2, 2)]]),
    ],
)
def test_the_parts_of_a_batch_are_dealt_out_in_turns(
    rows: int, micro_batches: int, replicas: int, dealt: list[list[tuple[int, int]]]
) -> None:
    """Numbers and rows of each round; what lacks a part has no rows and no values."""
    whole = torch.arange(float(rows)).unsqueeze(1)
    stream = list(
        read_micro_batches(
            lambda _: [{"x": whole}], 0, micro_batches, Extent(batches=1), lambda part: part, replicas=replicas
        )
    )
    assert [[(header.number, header.rows) for header, _ in turn] for turn in stream] == dealt
    assert [[header.replica for header, _ in turn] for turn in stream] == [list(range(replicas))] * len(dealt)
    parts = [values["x"] for turn in stream for header, values in turn if header.rows]
    assert torch.equal(torch.cat(parts), whole)
    assert not any(values for turn in stream for header, values in turn if not header.rows)
    for i, turn in enumerate(stream):
        for header, _ in turn:
            last = i + 1 == len(dealt)
            assert (header.g, header.index, header.count) == (i, i, len(dealt))
            assert (header.final, header.ends_batch, header.batch_rows) == (1, last, rows)


def test_numbers_go_on_where_the_batches_before_lacked_parts() -> None:
    sizes = iter([5, 1, 4])
    batches = [{"x": torch.zeros(size, 1)} for size in sizes]
    stream = read_micro_batches(lambda _: batches, 0, 2, Extent(epochs=1), lambda part: part, replicas=2)
    numbers = [header.number for turn in stream for header, _ in turn if header.rows]
    assert numbers == [0, 1, 2, 3, 4, 6, 7, 8, 9]
