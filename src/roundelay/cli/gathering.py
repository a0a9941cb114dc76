"""Who takes part in a hosted run: machines come, are measured and judged, before the run is planned.

Where a machine does not fit, says nothing or leaves, its place is offered anew, by another invitation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import final

from roundelay.cli.screen import stderr
from roundelay.errors import DeadlineError, UsageError, counted
from roundelay.ir.num_bytes import bytes_text
from roundelay.launching.last_words import one_line
from roundelay.membership.roster import Seat, State, moved, name_after
from roundelay.peers.door import Door
from roundelay.peers.gate import Gate
from roundelay.peers.members import Members
from roundelay.peers.reach import unreached
from roundelay.session.offer import ENDED, OFFER, PROBE, PROBE_BYTES, VERDICT, Offer, refusal
from roundelay.transport.grpc_member import name_of
from roundelay.trust.authority import Authority, Credentials
from roundelay.trust.invitation import address_text

OFFER_S = 180.0
"""Seconds in which a machine that has joined must have measured itself."""

ARITHMETIC, UNREACHED, NO_OFFER = REASONS = "another arithmetic", "not reached by others", "no offer"
"""Why a machine that has joined does not take part, in the file of refusals."""

LEFT = "it has left"
TELL_S = 0.5
"""Seconds in which those that wait may hear that the host ends."""

_PROBED = bytes(PROBE_BYTES)
_TICK_S = 0.2


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """A run that waits for machines.

    Args:
        authority: of the run.
        own: credentials of the host.
        gate: the port of this machine.
        texts: the members' service.
        door: lets in who has an invitation.
        came: the seats that are given.
        left: names of machines that have left while they waited.
        refuse: called with a peer and why it was refused.
    """

    authority: Authority
    own: Credentials
    gate: Gate
    texts: Members
    door: Door
    came: SimpleQueue[Seat]
    left: SimpleQueue[str]
    refuse: Callable[[str, str], None]


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """A worker's place.

    Args:
        name: of the machine that is invited to it.
        seat: the number of its seat.
        until: by the monotonic clock, when its invitation expires.
        since: when the machine has joined, by this clock; None: it has not.
        offer: its offer, once it has been judged.
    """

    name: str
    seat: int
    until: float
    since: float | None = None
    offer: Offer | None = None


@final
class Gathering:
    """Invites machines, one for each worker but this machine's.

    Args:
        waiting: the run.
        workers: how many it will have.
        own: offer of this machine.
        wait_s: seconds for which an invitation is good.
        outside: whether machines elsewhere can come.
    """

    def __init__(self, waiting: Waiting, workers: int, own: Offer, wait_s: float, *, outside: bool) -> None:
        self._waiting, self._workers, self._own, self._wait_s, self._outside = waiting, workers, own, wait_s, outside
        self._places: dict[int, _Place] = {}
        for worker in range(1, workers):
            self._invite(worker, name_of(worker), "")

    def gathered(self) -> tuple[list[str], list[Offer]]:
        """Return names and offers of all machines, this one first, when all have come.

        Raises:
            DeadlineError: one does not come in time.
            UsageError: too many machines did not fit into one place.
        """
        try:
            while not self.complete():
                self._hear_who_comes()
                for worker, place in [*self._places.items()]:
                    if place.since is not None and place.offer is None:
                        self._judge(worker, place, place.since)
                    elif place.since is None and time.monotonic() > place.until:
                        raise self._late()
        except BaseException:
            self._tell_that_it_ends()
            raise
        for place in self._places.values():
            self._waiting.texts.leave(place.name, VERDICT, b"")
        names = [name_of(0), *[place.name for place in self._places.values()]]
        return names, [self._own, *[place.offer for place in self._places.values() if place.offer]]

    def complete(self) -> bool:
        """Whether all are here still; the place of one that has left is offered to another."""
        while not self._waiting.left.empty():
            name = self._waiting.left.get()
            for worker, place in [*self._places.items()]:
                if place.name == name:
                    self._replace(worker, place, LEFT)
        return all(place.offer for place in self._places.values())

    def _hear_who_comes(self) -> None:
        with suppress(Empty):
            seat = self._waiting.came.get(timeout=_TICK_S)
            for worker, place in [*self._places.items()]:
                if place.seat == seat.number and place.since is None:
                    self._places[worker] = replace(place, since=time.monotonic())
                    here = 1 + sum(one.since is not None for one in self._places.values())
                    self._say(f"{place.name} has joined: {here} of {self._workers} machines are here.")

    def _judge(self, worker: int, place: _Place, since: float) -> None:
        """Look whether a machine has made its offer, and whether it fits."""
        text = self._waiting.texts.find(f"{OFFER} {place.name}")
        if text is None:
            if time.monotonic() - since > OFFER_S:
                self._refuse(worker, place, NO_OFFER, f"it has not measured itself within {OFFER_S:g} s")
            return
        try:
            offer = Offer.parse(text, place.name)
        except UsageError as error:
            return self._refuse(worker, place, NO_OFFER, f"{error.subject}: {error.got}")
        self._waiting.texts.drop(place.name, PROBE)
        rate = f"{8e-6 * offer.bytes_per_s:,.0f} Mbit/s, {1e3 * offer.rtt_s:.3g} ms"
        threads = counted(offer.threads, "thread")
        speed = f"with {threads} {self._own.probe_all_s / offer.probe_all_s:.2f} times as fast as this machine"
        self._say(f"{place.name}: {speed}, {bytes_text(offer.memory_bytes)}, {rate}.")
        if why := refusal(self._own, offer):
            self._refuse(worker, place, ARITHMETIC, why)
        elif worker < self._workers - 1 and (why := self._unreached(place.name, offer)):
            self._refuse(worker, place, UNREACHED, why)
        else:
            self._places[worker] = replace(place, offer=offer)

    def _unreached(self, name: str, offer: Offer) -> str:
        """Why the machine with the next stage will not reach this one; empty if it will."""
        why = unreached(offer.address, name, self._waiting.own, self._waiting.gate.loop)
        return why and (
            f"others do not reach it at {address_text(offer.address)}: {why}; join with --listen ADDRESS:PORT, of this "
            "machine, and let that TCP port in, or take the last invitation, whose machine nobody has to reach"
        )

    def _refuse(self, worker: int, place: _Place, reason: str, why: str) -> None:
        self._waiting.refuse(place.name, reason)
        self._waiting.texts.leave(place.name, VERDICT, why.encode())
        self._replace(worker, place, why)

    def _replace(self, worker: int, place: _Place, why: str) -> None:
        """Offer a place to another machine.

        Raises:
            UsageError: there have been too many.
        """
        self._waiting.texts.withdraw(place.name)
        self._waiting.door.update(lambda roster: moved(roster, place.seat, State.REVOKED))
        name = name_after(place.name)
        if name is None:
            raise UsageError(
                place.name,
                got=why,
                expected="machines that compute the same bits, that others reach, and that stay",
                remedy="Host the run again, and invite others.",
            )
        self._say(f"{place.name} does not take part: {one_line(why)}.")
        self._invite(worker, name, " in its place, that machine again or another")

    def _invite(self, worker: int, name: str, who: str) -> None:
        expiry = time.time() + self._wait_s
        self._waiting.texts.leave(name, PROBE, _PROBED)
        invitation = self._waiting.door.invite(name, int(expiry) + 1)
        self._places[worker] = _Place(name, invitation.seat, time.monotonic() + self._wait_s)
        listens = " --listen ADDRESS:PORT" if self._outside and worker < self._workers - 1 else ""
        where = ", with an address and a port of that machine" if listens else ""
        self._say(f"For {name}{who}, good once, until {_clock(expiry)}{where}:")
        stderr.print(f"  roundelay join {invitation.text()}{listens}", markup=False, soft_wrap=True)

    def _tell_that_it_ends(self) -> None:
        """Tell those who wait; they have a moment to hear it."""
        waiting = [place for place in self._places.values() if place.since is not None]
        for place in waiting:
            self._waiting.texts.leave(place.name, VERDICT, ENDED.encode())
        time.sleep(TELL_S if waiting else 0.0)

    def _late(self) -> DeadlineError:
        here = [place.name for place in self._places.values() if place.since is not None]
        missing = [place.name for place in self._places.values() if place.since is None]
        return DeadlineError(
            "machines that were invited",
            got=f"{len(here)} of {len(self._places)} within {self._wait_s:g} s, without {', '.join(missing)}",
            expected="all of them",
            remedy="Type the `roundelay join` lines on the other machines; --wait-s gives more time.",
        )

    def _say(self, line: str) -> None:
        stderr.print(line, markup=False)


def _clock(moment: float) -> str:
    """The time of day of this machine, with the day where that is not today."""
    then = time.localtime(moment)
    return time.strftime("%H:%M" if then[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", then)
