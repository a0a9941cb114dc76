"""Credits as counts in shared memory: none is lost, none is doubled, each keeps its channel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.transport.endpoint import Granted
from roundelay.transport.shm_credits import CreditsGiven, CreditsTaken
from roundelay.transport.shm_ring import HEAD, LEAST_BYTES, WANTED, Ring

CHANNELS = st.sampled_from([0, 1, 7, 2**31 - 1])
FULL = 232  # channels that a page has room for


@given(st.lists(st.one_of(CHANNELS, st.none())))
def test_whatever_is_given_is_taken_once(steps: list[int | None]) -> None:
    """None stands for a look at what is there."""
    ring = Ring(LEAST_BYTES)
    given, taken = CreditsGiven(ring), CreditsTaken({3: ring})
    got: list[int] = []
    for channel in [*steps, *[None] * len(steps)]:
        if channel is not None:
            given.give(channel)
        elif (credit := taken.take()) is not None:
            assert credit.source == 3
            got.append(credit.channel)
    assert sorted(got) == sorted(channel for channel in steps if channel is not None)
    assert taken.take() is None


def test_nothing_is_taken_of_a_giver_that_is_forgotten() -> None:
    rings = {1: Ring(LEAST_BYTES), 2: Ring(LEAST_BYTES)}
    givers = {source: CreditsGiven(ring) for source, ring in rings.items()}
    taken = CreditsTaken(rings)
    for giver in givers.values():
        giver.give(7)
        giver.give(7)
    assert taken.take() is not None
    taken.forget(1)
    for channel in (7, 8):
        givers[1].give(channel)
    assert [taken.take() for _ in range(3)] == [Granted(2, 7), Granted(2, 7), None]


def test_the_ring_s_own_numbers_are_left_alone() -> None:
    ring = Ring(LEAST_BYTES)
    given = CreditsGiven(ring)
    for channel in range(100):
        given.give(channel)
    assert [ring.counters[place] for place in (HEAD, WANTED)] == [0, 0]


def test_more_channels_than_there_is_room_for_are_refused() -> None:
    given = CreditsGiven(Ring(LEAST_BYTES))
    for channel in range(FULL):
        given.give(channel)
    with pytest.raises(InternalError, match="Cut the model where fewer values cross"):
        given.give(FULL)
