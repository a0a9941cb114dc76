"""The seats of a run, and who may take one: by an invitation, once, before it expires.

Pure functions: the time is an argument. A roster holds digests of secrets only.

Wrong secrets are counted for a minute, by network: after `TRIES_BY_NETWORK` of them a network is refused whatever it
says, after `TRIES_BY_RUN` every network that has sent one. A network that has sent none is still heard, so that a flood
cannot lock out those who are invited: a secret's 128 bits are not guessed.
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from roundelay.trust.authority import WORKER
from roundelay.trust.invitation import Invitation, digest_of

TRIES_BY_NETWORK, TRIES_BY_RUN = 5, 20
WINDOW_S = 60.0
"""Seconds that a wrong secret counts."""
MOST_WRONG = 1024
"""Most wrong secrets that are remembered."""

REASONS = (
    "unknown invitation",
    "invitation already used",
    "invitation expired",
    "run is full",
    "seat revoked",
    "too many wrong invitations",
)
"""Why nobody was admitted."""
UNKNOWN, USED, EXPIRED, FULL, WITHDRAWN, LOCKED = REASONS

NAME = r"worker-\d{1,4}[b-z]?"
"""What the machine of a worker may be called: the letter tells a second one in its place from the first."""


@final
class State(enum.Enum):
    """What a seat is."""

    INVITED = "invited"
    CERTIFIED = "certified"
    MEASURED = "measured"
    ACTIVE = "active"
    LEFT = "left"
    REVOKED = "revoked"


FOLLOWS = {
    State.INVITED: {State.CERTIFIED, State.REVOKED},
    State.CERTIFIED: {State.MEASURED, State.LEFT, State.REVOKED},
    State.MEASURED: {State.ACTIVE, State.LEFT, State.REVOKED},
    State.ACTIVE: {State.LEFT, State.REVOKED},
    State.LEFT: {State.REVOKED},
    State.REVOKED: set[State](),
}
"""What a seat may become."""

TAKEN = {State.CERTIFIED, State.MEASURED, State.ACTIVE}


@final
@dataclass(frozen=True, slots=True)
class Seat:
    """One place in a run, for the machine that brings its invitation.

    Args:
        number: its own.
        name: in the certificate of its owner.
        role: in the certificate of its owner.
        digest: of the invitation's secret (:func:`roundelay.trust.invitation.digest_of`).
        expiry: UTC, in seconds, from when on the invitation is refused.
        state: what it is.
        claim: whatever tells its owner's request from others'; empty while invited.
        generation: of the run, in which it was admitted.
    """

    number: int
    name: str
    role: str
    digest: bytes
    expiry: int
    state: State = State.INVITED
    claim: bytes = b""
    generation: int = 0


@final
class WrongTry(NamedTuple):
    """An unknown secret: when it came, and from which network."""

    time: float
    network: str


@final
@dataclass(frozen=True, slots=True)
class Roster:
    """All seats of a run.

    Args:
        seats: with different numbers and digests.
        room: most that may be taken at one time; there may be more invitations than that.
        wrong: the last wrong tries, in the order in which they came.
    """

    seats: tuple[Seat, ...]
    room: int
    wrong: tuple[WrongTry, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """What somebody brings who wants a seat.

    Args:
        secret: of an invitation, as it is said.
        claim: whatever tells its request from others'; the same claim may come again, as an answer may be lost.
        address: from where it comes.
    """

    secret: bytes
    claim: bytes
    address: str


def name_after(name: str) -> str | None:
    """Return what a machine is called that takes the place of the one with this name; None after 25 of them."""
    if name[-1].isdigit():
        return f"{name}b"
    return None if name[-1] == "z" else name[:-1] + chr(ord(name[-1]) + 1)


def seat_for(invitation: Invitation, name: str, role: str = WORKER) -> Seat:
    """Return the seat of an invitation, which keeps no secret."""
    return Seat(invitation.seat, name, role, digest_of(invitation.secret), invitation.expiry)


def invited(roster: Roster, seat: Seat) -> Roster:
    """Return the roster with one more seat, whose number and digest no other has."""
    assert all(seat.number != one.number and seat.digest != one.digest for one in roster.seats), seat.number
    return replace(roster, seats=(*roster.seats, seat))


def admit(roster: Roster, attempt: Attempt, now: float, generation: int) -> tuple[Roster, Seat | str]:
    """Return the roster after an attempt, and the seat that it gives or one of `REASONS`.

    Takes as long for a wrong secret as for a right one.

    Args:
        roster: before the attempt.
        attempt: what is brought.
        now: UTC, in seconds since 1970.
        generation: of the run.
    """
    network = network_of(attempt.address)
    recent = tuple(one for one in roster.wrong if 0 <= now - one.time < WINDOW_S)[-MOST_WRONG:]
    roster = replace(roster, wrong=recent)
    seat = _seat_with(roster.seats, digest_of(attempt.secret))
    if _locked(recent, network):
        return roster, LOCKED
    if seat is None:
        return replace(roster, wrong=(*recent, WrongTry(now, network))), UNKNOWN
    if reason := _refusal(roster, seat, attempt.claim, now):
        return roster, reason
    if seat.state is State.CERTIFIED:
        return roster, seat
    admitted = replace(seat, state=State.CERTIFIED, claim=attempt.claim, generation=generation)
    return _with(roster, admitted), admitted


def moved(roster: Roster, number: int, state: State) -> Roster:
    """Return the roster after the seat with this number has become `state`, which must be one that may follow."""
    (seat,) = (seat for seat in roster.seats if seat.number == number)
    assert state in FOLLOWS[seat.state], f"seat {number} from {seat.state.value} to {state.value}"
    return _with(roster, replace(seat, state=state))


def taken(seats: Iterable[Seat]) -> list[Seat]:
    """Return the seats that somebody has."""
    return [seat for seat in seats if seat.state in TAKEN]


def network_of(address: str) -> str:
    """Return what wrong tries from an address count for: itself, or the /64 of an address of IPv6."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv4Address):
        return str(number)
    if number.ipv4_mapped:
        return str(number.ipv4_mapped)
    return str(ipaddress.ip_network((int(number) >> 64 << 64, 64)))


def _seat_with(seats: Iterable[Seat], digest: bytes) -> Seat | None:
    """The seat with this digest; compares with all of them."""
    equal = [seat for seat in seats if hmac.compare_digest(seat.digest, digest)]
    return equal[0] if equal else None


def _locked(wrong: Iterable[WrongTry], network: str) -> bool:
    own = [one.network == network for one in wrong]
    return sum(own) >= (TRIES_BY_NETWORK if len(own) < TRIES_BY_RUN else 1)


def _refusal(roster: Roster, seat: Seat, claim: bytes, now: float) -> str | None:
    """Why a seat is not given to who knows its secret; None if it is."""
    again = seat.state is State.CERTIFIED and hmac.compare_digest(seat.claim, claim)
    if seat.state is State.REVOKED:
        return WITHDRAWN
    if seat.state is not State.INVITED and not again:
        return USED
    if now >= seat.expiry:
        return EXPIRED
    return FULL if not again and len(taken(roster.seats)) >= roster.room else None


def _with(roster: Roster, seat: Seat) -> Roster:
    return replace(roster, seats=tuple(seat if one.number == seat.number else one for one in roster.seats))
