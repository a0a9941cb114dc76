"""Headers of micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roundelay.ir.micro_batch import MicroBatch, stream

NUMBERS = st.integers(0, 2**62)


@given(st.builds(MicroBatch, *[NUMBERS] * 9))
def test_a_header_is_read_from_the_numbers_it_is_sent_as(header: MicroBatch) -> None:
    assert MicroBatch.of(header.numbers()) == header
    assert all(type(number) is int for number in header.numbers())


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 9), st.integers(0, 50), st.integers(0, 50))
def test_a_stream_numbers_micro_batches_through_and_closes_every_batch(
    counts: list[int], rows: int, start_g: int, start_batch: int
) -> None:
    headers = stream(counts, rows=rows, start_g=start_g, start_batch=start_batch)
    assert [header.g for header in headers] == list(range(start_g, start_g + sum(counts)))
    places = [(start_batch + t, i, counts[t]) for t in range(len(counts)) for i in range(counts[t])]
    assert [(header.batch, header.index, header.count) for header in headers] == places
    assert [header.ends_batch for header in headers] == [i + 1 == count for _, i, count in places]
    assert [header.final for header in headers] == [int(batch == headers[-1].batch) for batch, _, _ in places]
    assert [header.ends_epoch for header in headers] == [int(batch == headers[-1].batch) for batch, _, _ in places]
    assert all((header.rows, header.batch_rows) == (rows, rows * header.count) for header in headers)


def test_the_weight_of_a_short_micro_batch_is_its_share_of_the_rows() -> None:
    full = MicroBatch(0, 0, 0, 2, rows=6, batch_rows=8, epoch=0, ends_epoch=0, final=0)
    short = MicroBatch(1, 0, 1, 2, rows=2, batch_rows=8, epoch=0, ends_epoch=0, final=0)
    assert (full.weight, short.weight) == (0.75, 0.25)
    assert (full.ends_batch, short.ends_batch) == (False, True)
