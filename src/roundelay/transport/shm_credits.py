"""Credits between two processes as numbers that only grow, in memory that they share.

A credit says no more than that a slot is free, so it needs no message: for each channel there is a count of the credits
ever given, which is the giver's, and the taker keeps how many of them it has taken. To give one is one store, and to
look for one is one load; only a taker that sleeps for want of a credit has to be woken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from roundelay.errors import InternalError
from roundelay.transport.endpoint import Granted
from roundelay.transport.shm_ring import FIRST_FREE, Fence, Ring

_USED, _ENTRIES = FIRST_FREE, FIRST_FREE + 16
"""Places: of how many channels there is an entry; of the entries, a channel and its count each."""


@final
class CreditsGiven:
    """The giver's end, beside the ring of its messages: for one thread.

    Args:
        ring: in whose counters the credits stand.
    """

    def __init__(self, ring: Ring) -> None:
        self._counters = ring.counters
        self._places: dict[int, int] = {}
        self._fence = Fence()

    def give(self, channel: int) -> None:
        """One credit more of ``channel``.

        Raises:
            InternalError: the two workers have more channels than there is room for.
        """
        place = self._places.get(channel)
        if place is None:
            place = self._enter(channel)
        self._counters[place + 1] += 1
        self._fence()  # the taker says that it sleeps, then looks at the counts; we the other way round

    def _enter(self, channel: int) -> int:
        count = len(self._places)
        place = _ENTRIES + 2 * count
        if place + 1 >= len(self._counters):
            raise InternalError(
                "credits between two workers",
                got=f"channel {channel} behind {count} others",
                expected=f"at most {count} channels from one worker to another",
                remedy="Cut the model where fewer values cross.",
            )
        self._counters[place] = channel
        self._fence.order()
        self._counters[_USED] = count + 1
        self._places[channel] = place
        return place


@final
class CreditsTaken:
    """The taker's end, of all givers: for one thread.

    Args:
        rings: by giver, the same as the giver's.
    """

    def __init__(self, rings: Mapping[int, Ring]) -> None:
        self._counters = {giver: ring.counters for giver, ring in rings.items()}
        self._known = dict.fromkeys(rings, 0)
        self._counts: list[_Count] = []

    def take(self) -> Granted | None:
        """A credit that is there, which is then taken; or None."""
        for count in self._counts:
            if count.counters[count.place] != count.taken:
                count.taken += 1
                return count.credit
        return self.take() if self._find_new() else None

    def forget(self, giver: int) -> None:
        """Take no more of `giver`'s credits."""
        del self._counters[giver]
        self._counts = [count for count in self._counts if count.credit.source != giver]

    def _find_new(self) -> bool:
        """Whether credits have been given of channels that had none before."""
        before = len(self._counts)
        for giver, counters in self._counters.items():
            while self._known[giver] < counters[_USED]:
                place = _ENTRIES + 2 * self._known[giver]
                self._counts.append(_Count(counters, place + 1, Granted(giver, counters[place])))
                self._known[giver] += 1
        return len(self._counts) > before


@final
@dataclass(slots=True)
class _Count:
    """The credits of one channel: where they are counted, and how many have been taken."""

    counters: memoryview[int]
    place: int
    credit: Granted
    taken: int = 0
