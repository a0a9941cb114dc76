"""The roster: an invitation gives one seat, once, in time; wrong secrets are counted and shut nobody else out."""

from __future__ import annotations

import hmac
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from roundelay.membership import roster as rosters
from roundelay.membership.roster import (
    FOLLOWS,
    NAME,
    Attempt,
    Roster,
    Seat,
    State,
    admit,
    moved,
    name_after,
    network_of,
    seat_for,
    taken,
)
from roundelay.trust.invitation import Invitation

NOW, EXPIRY = 1_800_000_000.0, 1_800_003_600
SECRETS = [bytes([k]) * 16 for k in range(4)]
HOME, ELSEWHERE = "198.51.100.1", "198.51.100.2"


def invitation(seat: int) -> Invitation:
    return Invitation((("203.0.113.7", 1),), "00" * 8, bytes(32), SECRETS[seat], EXPIRY, seat)


def roster(room: int = 4) -> Roster:
    return Roster(tuple(seat_for(invitation(k), f"worker-{k}") for k in range(4)), room)


def attempt(number: int, claim: bytes = b"key", address: str = HOME) -> Attempt:
    return Attempt(SECRETS[number], claim, address)


WRONG = Attempt(b"guess", b"key", HOME)


def test_an_invitation_gives_its_seat() -> None:
    after, seat = admit(roster(), attempt(2), NOW, 7)
    assert isinstance(seat, Seat)
    assert (seat.number, seat.name, seat.state, seat.generation) == (2, "worker-2", State.CERTIFIED, 7)
    assert taken(after.seats) == [seat]
    assert SECRETS[2] not in repr(after).encode("latin-1")


def test_it_is_refused_a_second_time_except_to_the_same_key() -> None:
    after, seat = admit(roster(), attempt(2), NOW, 0)
    assert admit(after, attempt(2), NOW + 1, 0) == (after, seat)
    assert admit(after, attempt(2, b"another key"), NOW + 1, 0) == (after, rosters.USED)
    measured = moved(after, 2, State.MEASURED)
    assert admit(measured, attempt(2), NOW + 1, 0) == (measured, rosters.USED)


def test_it_is_refused_when_late_or_withdrawn_or_when_no_room_is_left() -> None:
    assert admit(roster(), attempt(1), EXPIRY, 0)[1] == rosters.EXPIRED
    assert isinstance(admit(roster(), attempt(1), EXPIRY - 1, 0)[1], Seat)
    assert admit(moved(roster(), 1, State.REVOKED), attempt(1), NOW, 0)[1] == rosters.WITHDRAWN
    full, _ = admit(roster(room=1), attempt(1), NOW, 0)
    assert admit(full, attempt(2), NOW, 0) == (full, rosters.FULL)
    assert isinstance(admit(moved(full, 1, State.LEFT), attempt(2), NOW, 0)[1], Seat)


def tried(before: Roster, times: int, address: str = HOME, now: float = NOW) -> Roster:
    for _ in range(times):
        before, reason = admit(before, replace(WRONG, address=address), now, 0)
        assert isinstance(reason, str)
    return before


def test_after_five_wrong_secrets_their_network_is_refused_for_a_minute() -> None:
    four, five = tried(roster(), 4), tried(roster(), 5)
    assert isinstance(admit(four, attempt(0), NOW, 0)[1], Seat)
    assert admit(five, attempt(0), NOW + 59, 0)[1] == rosters.LOCKED
    assert admit(five, WRONG, NOW + 59, 0)[1] == rosters.LOCKED
    assert isinstance(admit(five, attempt(0), NOW + 60, 0)[1], Seat)
    assert isinstance(admit(five, attempt(0, address=ELSEWHERE), NOW, 0)[1], Seat)


def test_what_is_refused_while_locked_does_not_prolong_it() -> None:
    later = tried(tried(roster(), 5), 100, now=NOW + 59)
    assert len(later.wrong) == 5
    assert isinstance(admit(later, attempt(0), NOW + 60, 0)[1], Seat)


def test_after_twenty_wrong_secrets_every_network_that_sent_one_is_refused_and_no_other() -> None:
    flooded = roster()
    for k in range(20):
        flooded = tried(flooded, 1, f"192.0.2.{k}")
    assert admit(flooded, attempt(0, address="192.0.2.3"), NOW, 0)[1] == rosters.LOCKED
    assert isinstance(admit(flooded, attempt(0, address=ELSEWHERE), NOW, 0)[1], Seat)


def test_a_flood_from_everywhere_takes_bounded_memory() -> None:
    flooded = roster()
    for k in range(rosters.MOST_WRONG + 50):
        flooded = tried(flooded, 1, f"10.0.{k // 256}.{k % 256}")
    assert len(flooded.wrong) <= rosters.MOST_WRONG + 1


def test_a_clock_that_is_set_back_locks_nobody_out_for_long() -> None:
    assert isinstance(admit(tried(roster(), 5), attempt(0), NOW - 3600, 0)[1], Seat)


def test_known_but_refused_invitations_are_no_wrong_secrets() -> None:
    late = roster()
    for _ in range(30):
        late, reason = admit(late, attempt(0), EXPIRY, 0)
        assert reason == rosters.EXPIRED


@pytest.mark.parametrize("who", [attempt(0), attempt(3), WRONG])
def test_every_secret_is_compared_with_all_seats(who: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def count(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", count)
    for before in (roster(), tried(roster(), 5)):
        digests = [seat.digest for seat in before.seats]
        compared.clear()
        admit(before, who, NOW, 0)
        assert [one for one in compared if one in digests] == digests


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("198.51.100.1", "198.51.100.1"),
        ("::ffff:198.51.100.1", "198.51.100.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix:", "unix:"),
    ],
)
def test_a_network_is_an_address_or_what_one_household_has(address: str, network: str) -> None:
    assert network_of(address) == network


@given(st.sampled_from(State), st.sampled_from(State))
def test_a_seat_becomes_only_what_may_follow(state: State, following: State) -> None:
    before = replace(roster(), seats=(replace(roster().seats[0], state=state),))
    if following in FOLLOWS[state]:
        assert moved(before, 0, following).seats[0].state is following
    else:
        with pytest.raises(AssertionError, match="seat 0 from"):
            moved(before, 0, following)


class Machine(RuleBasedStateMachine):
    """Attempts, moves and time in any order, against counts of our own."""

    @initialize(room=st.integers(1, 4))
    def begin(self, room: int) -> None:
        self.roster, self.now = roster(room), NOW
        self.owners: dict[int, bytes] = {}
        self.wrong: list[tuple[float, str]] = []

    @rule(seconds=st.sampled_from([1.0, 20.0, 61.0, 1900.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        number=st.integers(0, 5),
        claim=st.sampled_from([b"a", b"b"]),
        address=st.sampled_from([HOME, *[f"192.0.2.{k}" for k in range(7)]]),
        times=st.integers(1, 4),
    )
    def attempt(self, number: int, claim: bytes, address: str, times: int) -> None:
        for _ in range(times):
            self.attempt_once(number, claim, address)

    def attempt_once(self, number: int, claim: bytes, address: str) -> None:
        before, secret = self.roster, SECRETS[number] if number < 4 else b"guess"
        self.roster, outcome = admit(before, Attempt(secret, claim, address), self.now, 3)
        recent = [where for when, where in self.wrong if self.now - when < 60]
        if recent.count(address) >= 5 or (len(recent) >= 20 and address in recent):
            assert outcome == rosters.LOCKED
        elif number >= 4:
            assert outcome == rosters.UNKNOWN
            self.wrong.append((self.now, address))
        elif isinstance(outcome, Seat):
            assert outcome.number == number
            assert self.now < EXPIRY
            assert self.owners.setdefault(number, claim) == claim
        else:
            assert outcome in rosters.REASONS
            assert self.roster.seats == before.seats
            state = before.seats[number].state
            fits = {
                rosters.USED: state not in (State.INVITED, State.REVOKED),
                rosters.WITHDRAWN: state is State.REVOKED,
                rosters.EXPIRED: self.now >= EXPIRY,
                rosters.FULL: state is State.INVITED and len(taken(before.seats)) == before.room,
            }
            assert fits[outcome]

    @rule(number=st.integers(0, 3), data=st.data())
    def move(self, number: int, data: st.DataObject) -> None:
        after = FOLLOWS[self.roster.seats[number].state] - {State.CERTIFIED}
        if after:
            self.roster = moved(self.roster, number, data.draw(st.sampled_from(sorted(after, key=str))))

    @invariant()
    def seats_stay(self) -> None:
        if hasattr(self, "roster"):
            assert [seat.number for seat in self.roster.seats] == [0, 1, 2, 3]
            assert len(taken(self.roster.seats)) <= self.roster.room
            assert all(seat.claim == self.owners[seat.number] for seat in taken(self.roster.seats))


def test_attempts_moves_and_time_in_any_order_give_each_seat_to_one_owner() -> None:
    run_state_machine_as_test(Machine)


def test_a_second_machine_in_a_place_has_another_name() -> None:
    names = ["worker-12"]
    while following := name_after(names[-1]):
        names.append(following)
    assert names[:3] == ["worker-12", "worker-12b", "worker-12c"]
    assert len({*names}) == len(names) == 26
    assert all(re.fullmatch(NAME, name) for name in names)
