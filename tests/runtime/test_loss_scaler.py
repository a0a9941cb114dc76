"""Stage 0 chooses a loss scale, of news that come late, and in the reference's way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import DivergedError
from roundelay.ir.loss_scale import HOPELESS, LEAST, MOST, LossScale
from roundelay.ir.micro_batch import stream
from roundelay.reference.gradients import ScaleTable
from roundelay.runtime.loss_scaler import LossScaler


def given_scales(rule: LossScale, finite: Sequence[bool], count: int = 1, late: int = 0) -> list[float]:
    """What the micro-batches of equal batches carry, if stage 0 runs each backward ``late`` behind its forward."""
    scales, carried, headers = LossScaler(rule, None), [], stream([count] * len(finite))
    for g, header in enumerate(headers):
        carried.append(scales.give(header))
        if g >= late and headers[g - late].ends_batch:
            scales.finished(headers[g - late], 1.0 if finite[headers[g - late].batch] else math.nan)
    return carried


def test_it_halves_behind_a_bad_batch_and_doubles_behind_enough_good_ones() -> None:
    finite = [False, True, True, False, True, True, True, True, True]
    assert given_scales(LossScale(64.0, 3), finite) == [64, 32, 32, 32, 16, 16, 16, 32, 32]
    assert given_scales(LossScale(64.0, 0), finite) == [64] * 9


def test_one_mistake_is_halved_once_however_many_batches_are_on_the_way() -> None:
    finite = [False] * 4 + [True] * 8
    assert given_scales(LossScale(64.0, 100), finite, late=3) == [64] * 4 + [32] * 8
    assert given_scales(LossScale(64.0, 100), [False] * 5 + [True] * 7, late=3) == [64] * 4 + [32] * 4 + [16] * 4


def test_only_what_carried_the_scale_in_force_counts_for_a_larger_one() -> None:
    """Behind a doubling, three batches on the way still carry the scale before it."""
    assert given_scales(LossScale(1.0, 2), [True] * 12, late=3) == [1] * 5 + [2] * 5 + [4] * 2


def test_a_batch_may_carry_two_scales_and_asks_for_half_the_larger() -> None:
    finite = [False, False, True, True]
    assert given_scales(LossScale(64.0, 100), finite, count=2, late=1) == [64, 64, 64, 32, 32, 32, 32, 32]


def test_there_is_a_most() -> None:
    assert given_scales(LossScale(MOST / 2, 1), [True] * 4) == [MOST / 2, MOST, MOST, MOST]


def test_below_the_least_the_run_ends() -> None:
    assert given_scales(LossScale(1.0, 9), [False] * 24)[-1] == 2 * LEAST
    with pytest.raises(DivergedError, match="the gradients of batch 24"):
        given_scales(LossScale(1.0, 9), [False] * 25)


def test_a_scale_that_stays_ends_the_run_behind_as_many_bad_batches_as_halve_the_most_to_the_least() -> None:
    assert MOST / 2**HOPELESS == LEAST
    rule, bad = LossScale(64.0, 0), [False] * (HOPELESS - 1)
    assert given_scales(rule, bad) == [64.0] * (HOPELESS - 1)
    assert len(given_scales(rule, [*bad, True, *bad])) == 2 * HOPELESS - 1
    with pytest.raises(DivergedError, match=rf"batch {HOPELESS}:.*{HOPELESS} batches.*scaled by 64;.*dynamic"):
        given_scales(rule, [True, *bad, False])


@given(
    st.lists(st.booleans(), min_size=1, max_size=24),
    st.integers(1, 4),
    st.integers(0, 5),
    st.sampled_from([LossScale(2.0**30, 1), LossScale(2.0**30, 3), LossScale(8.0, 0)]),
)
def test_the_reference_comes_to_the_same(finite: list[bool], count: int, late: int, rule: LossScale) -> None:
    """``late`` micro-batches behind a forward stage 0 has run its backward: U(0, g) counts the batches before that."""
    table, wanted = ScaleTable(rule, None, 0), []
    for header in stream([count] * len(finite)):
        wanted.append(table.enter(max(0, header.g - late) // count - 1))
        if header.ends_batch:
            table.end(header.batch, finite[header.batch])
    assert given_scales(rule, finite, count, late) == wanted


def test_where_nothing_is_scaled_no_scale_is_to_blame() -> None:
    """A norm that clips may be no finite number; what then happens to the weights is told by the loss."""
    assert given_scales(LossScale(), [False] * (2 * HOPELESS)) == [0.0] * (2 * HOPELESS)
