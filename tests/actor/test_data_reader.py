"""The reader as an actor, against cases worked out by hand and against what a register is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.actor.data_reader import Reader


def spans(reader: Reader) -> list[tuple[float, float]]:
    """When each batch was loaded."""
    return [(load.start_s, load.end_s) for load in reader.loads]


def test_two_registers_are_loaded_at_once_and_a_third_batch_when_the_first_is_done_with() -> None:
    reader = Reader(0, 2)
    assert [reader.request(batch, 2.0, now) for batch, now in ((0, 1.0), (1, 4.0), (2, 9.0))] == [3.0, 5.0, 9.0]
    assert spans(reader) == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0)]
    assert [(load.worker, load.batch) for load in reader.loads] == [(0, 0), (0, 1), (0, 2)]
    assert reader.peak == 2


def test_a_reader_that_is_done_waits_for_a_register() -> None:
    reader = Reader(0, 2)
    assert [reader.request(batch, 1.0, now) for batch, now in ((0, 0.0), (1, 10.0), (2, 20.0))] == [1.0, 10.0, 20.0]
    assert spans(reader) == [(0.0, 1.0), (1.0, 2.0), (10.0, 11.0)]


def test_one_register_is_reading_in_line() -> None:
    reader = Reader(0, 1)
    assert [reader.request(batch, 1.0, now) for batch, now in ((0, 0.0), (1, 10.0), (2, 20.0))] == [1.0, 11.0, 21.0]
    assert reader.peak == 1


def test_a_micro_batch_of_a_batch_that_is_there_is_there() -> None:
    reader = Reader(3, 2)
    assert [reader.request(7, 1.0, now) for now in (0.0, 1.0, 5.0)] == [1.0, 1.0, 5.0]
    assert len(reader.loads) == 1


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.25, 1.0, 9.0])), min_size=1, max_size=20),
)
def test_it_loads_as_early_as_the_registers_allow_and_no_earlier(
    registers: int, batches: list[tuple[float, float]]
) -> None:
    """Against a reader that moves in steps of a quarter second: it may begin while fewer registers are in use."""
    reader, now, asked = Reader(0, registers), 0.0, []
    for batch, (load_s, use_s) in enumerate(batches):
        asked.append(now)
        now = reader.request(batch, load_s, now) + use_s
    assert reader.peak <= registers
    assert all(a.end_s <= b.start_s for a, b in pairwise(reader.loads))
    for number, load in enumerate(reader.loads):
        begin = 0.0 if number == 0 else reader.loads[number - 1].end_s
        while number - sum(at <= begin for at in asked[1:]) >= registers:
            begin += 0.25
        assert load.start_s == begin


@pytest.mark.parametrize("registers", [1, 2, 3])
def test_all_registers_are_put_to_use_by_a_slow_worker(registers: int) -> None:
    reader = Reader(0, registers)
    for batch in range(6):
        reader.request(batch, 1.0, 100.0 * batch)
    assert reader.peak == registers
