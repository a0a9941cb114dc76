"""The door: who has an invitation gets a certificate, whoever else comes is refused by a reason, and both at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import DeadlineError, RoundelayError, UsageError, WorkerLostError
from roundelay.membership import roster as rosters
from roundelay.membership.roster import State, moved
from roundelay.peers import door as doors
from roundelay.peers import knock as knocking
from roundelay.peers import listener as listeners
from roundelay.peers import refusals
from roundelay.peers.knock import knock
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.messages import JOIN_S, MAX_BYTES, Join, Refusal, Versions, Welcome, decode_join, encode
from roundelay.trust import request as requests
from roundelay.trust.authority import BACKUP, new_authority
from roundelay.trust.certificates import is_issued_to, validity_of
from roundelay.trust.invitation import Invitation, new_secret
from roundelay.trust.request import new_request
from tests.peers.strangers import (
    MEMBERS,
    OURS,
    RUN,
    VERSIONS,
    WAIT_S,
    Opened,
    call,
    calling,
    from_elsewhere,
    in_child,
    opened,
    send,
)
from tests.transport.test_gloo import listening_addresses, open_things, settled

LOOPBACKS, ANY = {"0100007F", "0000000000000000FFFF00000100007F"}, "00000000"
"""127.0.0.1 of IPv4 and as an address of IPv6, and 0.0.0.0, as the kernel lists them."""


def join_of(secret: bytes, request: bytes = b"") -> Join:
    return Join(*VERSIONS.comparable(), secret, request or new_request()[1])


# --- who is let in


def test_who_has_an_invitation_gets_a_certificate_for_its_own_key(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            invitation = Invitation.parse(at.invite(role=BACKUP).text())
            joined = at.join(invitation)
            welcome, own = joined.welcome, joined.credentials
            assert (welcome.run, welcome.seat, welcome.name, welcome.role) == (RUN, 0, "worker-0", BACKUP)
            assert (welcome.members, welcome.generation, joined.door) == (MEMBERS, 0, at.gate.address)
            assert own.authority == OURS.certificate
            assert is_issued_to(own.certificate, own.authority, own.key)
            assert not is_issued_to(own.certificate, own.authority, new_request()[0])
            (seat,) = at.door.roster.seats
            assert seat.state is State.CERTIFIED
            assert at.admitted == [seat]
            assert at.reasons() == []
            assert invitation.secret.hex() not in repr(at.door.roster)

    in_child(body)


def test_the_door_listens_on_loopback_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path):
            assert set(listening_addresses()) <= LOOPBACKS
        with opened(tmp_path, listen=("0.0.0.0", 0)) as at:
            assert sorted(listening_addresses())[0] == ANY
            assert set(listening_addresses()) - {ANY} <= LOOPBACKS
            at.join(at.invite(addresses=(("127.0.0.1", at.gate.address[1]),)))
            with pytest.raises(UsageError, match="none, while the door listens on all"):
                at.invite()
        with opened(tmp_path, listen=("::1", 0)) as at:
            assert at.join().door == at.gate.address

    in_child(body)


def test_an_end_leaves_no_thread_and_no_socket(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            at.join()
        before = open_things()
        with opened(tmp_path) as at:
            at.join()
            thread = threading.Thread(target=send, args=(at.gate.address, b"\x16"))
            thread.start()
            time.sleep(0.2)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert settled(listening_addresses, []) == []
        assert settled(lambda: open_things()[1] <= before[1], True)

    in_child(body)


def test_a_door_that_is_closed_amid_calls_ends_them_without_a_word(tmp_path: Path) -> None:
    def body() -> None:
        with ThreadPoolExecutor(4) as pool:
            with opened(tmp_path) as at:
                calls = [pool.submit(call, at.gate.address, None) for _ in range(3)]
                silent = pool.submit(send, at.gate.address, b"", tls=True)
                time.sleep(0.5)
            assert [one.result(WAIT_S)[0] for one in calls] == ["UNAVAILABLE"] * 3
            assert silent.result(WAIT_S)[1] < WAIT_S

    in_child(body)


def test_an_address_that_cannot_be_listened_on_is_told(tmp_path: Path) -> None:
    def body() -> list[str]:
        with opened(tmp_path) as at:
            told = []
            for address in (at.gate.address, ("203.0.113.7", 0), ("no such host.", 0)):
                with pytest.raises(UsageError, match="listening on") as caught, opened(tmp_path, listen=address):
                    pass
                told.append(caught.value.got)
            return told

    assert in_child(body)[0] == "Address already in use"


def test_what_is_imported_for_a_door_is_imported_when_it_opens() -> None:
    code = (
        "import sys, roundelay.peers.door, roundelay.peers.knock; "
        "sys.exit(' '.join({'grpc', 'cryptography', 'torch'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_an_answer_that_was_lost_is_given_again_to_the_same_key_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer of the door is thrown away on its way."""

    def body() -> None:
        with opened(tmp_path) as at:
            invitation, called = at.invite(), knocking._call

            def lose(*given: Any) -> bytes:
                called(*given)
                monkeypatch.setattr(knocking, "_call", called)
                raise knocking._Unanswered("lost")

            monkeypatch.setattr(knocking, "_call", lose)
            assert at.join(invitation).welcome.seat == 0
            assert at.reasons() == []
            assert len(at.admitted) == 2
            with pytest.raises(UsageError, match="invitation already used"):
                at.join(invitation)

    in_child(body)


# --- who has no invitation that is good


def foreign(at: Opened) -> Invitation:
    return replace(at.invite(), secret=new_secret())


def used(at: Opened) -> Invitation:
    invitation = at.invite()
    at.join(invitation)
    return invitation


def full(at: Opened) -> Invitation:
    at.door.update(lambda roster: replace(roster, room=1))
    used(at)
    return at.invite()


def withdrawn(at: Opened) -> Invitation:
    invitation = at.invite()
    at.door.update(lambda roster: moved(roster, invitation.seat, State.REVOKED))
    return invitation


INVITED: dict[str, Callable[[Opened], Invitation]] = {
    rosters.UNKNOWN: foreign,
    rosters.USED: used,
    rosters.EXPIRED: lambda at: at.invite(seconds=-5),
    rosters.FULL: full,
    rosters.WITHDRAWN: withdrawn,
}


@pytest.mark.parametrize("reason", INVITED)
def test_an_invitation_that_is_not_good_is_refused_by_its_reason(reason: str, tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            bad = INVITED[reason](at)
            with pytest.raises(UsageError) as caught:
                at.join(bad)
            assert (caught.value.got, caught.value.exit_code) == (f"refused: {reason}", 2)
            assert caught.value.remedy == knocking.REMEDIES[reason]
            assert at.reasons() == [reason]
            assert bad.secret.hex() not in at.path.read_text()

    in_child(body)


@pytest.mark.parametrize(
    ("versions", "reason", "told"),
    [
        (Versions("0.0.9", "2.13.0"), refusals.OTHER_ROUNDELAY, "0.0.9 on this machine, '0.1.0' on the host"),
        (Versions("0.1.0", "2.12.1+cu128"), refusals.OTHER_TORCH, "2.12.1 on this machine, '2.13.0' on the host"),
    ],
)
def test_another_version_is_refused_and_the_invitation_stays_good(
    versions: Versions, reason: str, told: str, tmp_path: Path
) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            invitation = at.invite()
            with pytest.raises(UsageError) as caught:
                at.join(invitation, versions)
            assert caught.value.got == told
            assert at.reasons() == [reason]
            at.join(invitation, Versions("0.1.0", "2.13.0+cu128"))

    in_child(body)


def test_a_request_that_is_wrong_is_refused_and_the_invitation_stays_good(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            invitation = at.invite()
            bad = encode(join_of(invitation.secret, b"-----BEGIN CERTIFICATE REQUEST-----"))
            assert call(at.gate.address, bad)[0] == "let in"
            assert at.reasons() == [requests.UNREADABLE]
            at.join(invitation)

    in_child(body)


# --- who finds somebody else, or nobody


def test_a_joiner_talks_to_no_other_host_than_the_invitation_says(tmp_path: Path) -> None:
    def body() -> None:
        (tmp_path / "other").mkdir()
        with opened(tmp_path) as at, opened(tmp_path / "other") as other:
            wrong = replace(at.invite(), addresses=(other.gate.address,))
            with pytest.raises(UsageError, match="somebody else answers there"):
                at.join(wrong)
            assert other.log.counts == Counter()  # the secret was not even sent
            both = replace(wrong, addresses=(*wrong.addresses, at.gate.address))
            assert at.join(both).door == at.gate.address

    in_child(body)


def test_a_joiner_whose_call_reaches_another_than_was_looked_at_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is the right one, and the call then goes to another door."""

    def body() -> None:
        (tmp_path / "other").mkdir()
        with opened(tmp_path) as at, opened(tmp_path / "other") as other:
            host, port = other.gate.address
            monkeypatch.setattr(knocking, "_shown", lambda *_: (at.door._certificate, f"ipv4:{host}:{port}"))
            with pytest.raises(WorkerLostError, match="no answer to the call"):
                knock(at.invite(), 1.0, VERSIONS)
            assert other.admitted == []
            assert rosters.UNKNOWN not in other.log.counts

    in_child(body)


def test_an_address_where_nobody_answers_is_named_with_what_to_check(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            invitation = replace(at.invite(), addresses=(("127.0.0.1", 9), ("no-such-host.invalid", 4)))
            with pytest.raises(WorkerLostError) as caught:
                knock(invitation, 0.1, VERSIONS)
            assert "127.0.0.1:9: Connection refused; no-such-host.invalid:4: " in caught.value.got
            assert "TCP port 4 or 9" in caught.value.remedy
            good = replace(invitation, addresses=(*invitation.addresses, at.gate.address))
            assert knock(good, WAIT_S, VERSIONS).door == at.gate.address

    in_child(body)


@pytest.mark.parametrize(("days", "told"), [(-1, "not yet valid"), (60, "no longer valid")])
def test_a_wrong_clock_is_told(days: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(knocking.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + doors.timedelta(days=days)

    def body() -> None:
        with opened(tmp_path) as at:
            monkeypatch.setattr(knocking, "datetime", Clock)
            with pytest.raises(UsageError, match=told) as caught:
                at.join()
            assert "Set the clocks" in caught.value.remedy

    in_child(body)


@given(st.binary(max_size=60), st.booleans())
def test_an_answer_that_is_none_is_refused(received: bytes, tagged: bool) -> None:
    answer = msgspec.msgpack.encode({"type": "welcome", "seat": received}) if tagged else received
    invitation = Invitation((("h", 1),), RUN, bytes(32), bytes(16), 0, 0)
    with pytest.raises(RoundelayError):
        knocking._joined(invitation, ("h", 1), KEY, VERSIONS, answer)


KEY, REQUEST = new_request()


@pytest.mark.parametrize("change", [{"run": "another"}, {"seat": 1}, {"authority": b"x"}, {"certificate": b"x"}])
def test_an_answer_for_another_run_seat_or_key_is_refused(change: dict[str, Any]) -> None:
    invitation = Invitation((("h", 1),), RUN, bytes(32), bytes(16), 0, 0)
    signed = OURS.sign(REQUEST, "worker-0")
    good = Welcome(signed, OURS.certificate, RUN, 0, "worker-0", "worker", 0, MEMBERS)
    assert knocking._joined(invitation, ("h", 1), KEY, VERSIONS, encode(good)).welcome == good
    others = [msgspec.structs.replace(good, **change), replace_key(good)]
    for other in others:
        with pytest.raises(UsageError, match="an answer that does not fit"):
            knocking._joined(invitation, ("h", 1), KEY, VERSIONS, encode(other))


def replace_key(good: Welcome) -> Welcome:
    """The welcome with a certificate of the right name, of another authority."""
    forged = new_authority("roundelay", OURS.start, OURS.valid)
    return msgspec.structs.replace(good, certificate=forged.sign(REQUEST, "worker-0"))


# --- who does not even ask


STRANGERS: dict[str, tuple[Callable[[Opened], Any], str]] = {
    "plaintext HTTP": (lambda at: send(at.gate.address, b"GET / HTTP/1.1\r\n\r\n"), refusals.PLAINTEXT),
    "garbage": (lambda at: send(at.gate.address, b"\x00\xff" * 500), refusals.PLAINTEXT),
    "pickle": (lambda at: send(at.gate.address, b"\x80\x04\x95."), refusals.PLAINTEXT),
    "broken TLS": (lambda at: send(at.gate.address, b"\x16\x03\x01\x00\x20" + b"x" * 32), refusals.BROKEN),
    "much broken TLS": (lambda at: send(at.gate.address, b"\x16\x03\x01\x40\x00" + b"x" * 30_000), refusals.BROKEN),
    "another server": (
        lambda at: send(at.gate.address, b"", tls=True, server="www.example.org"),
        refusals.UNKNOWN_SERVICE,
    ),
    "TLS, then garbage": (lambda at: send(at.gate.address, b"garbage" * 20, tls=True), refusals.SILENT),
    "TLS, then much garbage": (lambda at: send(at.gate.address, b"x" * 30_000, tls=True), refusals.SILENT),
    "too much": (lambda at: call(at.gate.address, bytes(10 * MAX_BYTES)), refusals.OVERSIZE),
    "too much for a message": (lambda at: call(at.gate.address, bytes(MAX_BYTES + 1)), refusals.OVERSIZE),
    "no bytes": (lambda at: call(at.gate.address, b""), refusals.UNREADABLE),
    "other bytes": (lambda at: call(at.gate.address, b"\xff" * 40), refusals.UNREADABLE),
    "pickled": (lambda at: call(at.gate.address, b"\x80\x04\x95\x00."), refusals.UNREADABLE),
    "an unknown field": (lambda at: call(at.gate.address, more_fields(at)), refusals.UNREADABLE),
    "another method": (lambda at: call(at.gate.address, b"", "/roundelay.Door/Leave"), refusals.UNKNOWN_METHOD),
    "a worker's method": (lambda at: call(at.gate.address, b"", "/roundelay/Link"), refusals.UNKNOWN_METHOD),
}
TOLD = {
    "too much for a message": ["RESOURCE_EXHAUSTED", refusals.OVERSIZE],
    "other bytes": ["INVALID_ARGUMENT", refusals.UNREADABLE],
    "another method": ["UNIMPLEMENTED", refusals.UNKNOWN_METHOD],
}


def more_fields(at: Opened) -> bytes:
    fields = msgspec.msgpack.decode(encode(join_of(at.invite().secret)))
    return msgspec.msgpack.encode({**fields, "path": "/etc/passwd"})


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused_by_a_reason_while_a_joiner_gets_in(who: str, tmp_path: Path) -> None:
    come, reason = STRANGERS[who]

    def body() -> None:
        with opened(tmp_path) as at, ThreadPoolExecutor(1) as pool:
            coming = pool.submit(come, at)
            assert isinstance(at.join().welcome, Welcome)
            told = coming.result(WAIT_S)
            assert at.settled(1) == [reason]
            assert told == TOLD.get(who, told)
            assert len(at.admitted) == 1
        assert at.reasons() == [reason]

    in_child(body)


def test_a_plaintext_call_is_refused_and_gets_no_byte(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            assert call(at.gate.address, b"", root=b"")[0] == "UNAVAILABLE"
            assert set(at.settled(1)) == {refusals.PLAINTEXT}
            assert send(at.gate.address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")[0] == b""

    in_child(body)


SLOW: tuple[Callable[[Opened], Any], ...] = (
    lambda at: send(at.gate.address, b""),
    lambda at: send(at.gate.address, b"\x16\x03"),
    lambda at: send(at.gate.address, b"", tls=True),
    lambda at: send(at.gate.address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", tls=True),
    lambda at: call(at.gate.address, None),
)


def test_whoever_is_slow_is_cut_in_seconds_at_every_step_while_a_joiner_gets_in(tmp_path: Path) -> None:
    def timed(come: Callable[[Opened], Any], at: Opened) -> float:
        began = time.monotonic()
        come(at)
        return time.monotonic() - began

    def body() -> None:
        with opened(tmp_path) as at, ThreadPoolExecutor(len(SLOW)) as pool:
            coming = [pool.submit(timed, come, at) for come in SLOW]
            time.sleep(0.3)
            at.join()
            assert all(one.result(20.0) < JOIN_S + doors.GRACE_S + 1.5 for one in coming)
            assert at.settled(len(SLOW)) == [refusals.SLOW] * len(SLOW)

    in_child(body)


def test_who_only_looks_at_the_certificate_or_connects_is_not_written_down(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            knocking._shown(at.gate.address, WAIT_S)
            listeners.socket.create_connection(at.gate.address, WAIT_S).close()
            at.join()
            assert at.log.counts == Counter()

    in_child(body)


# --- many at once

SHORT = replace(doors.LIMITS, seconds=1.5)


def test_a_flood_of_wrong_secrets_locks_its_network_out_and_nobody_else(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at, from_elsewhere(at.gate.address, "127.0.0.2") as elsewhere:
            invitation, before = at.invite(), threading.Event()

            def flood() -> list[Any]:
                reasons, tries = [], 0
                while tries < 200:  # a connection lasts seconds: a new one goes on
                    with calling(elsewhere, None, at.gate.address) as channel:
                        asked, request = channel.unary_unary("/roundelay.Door/Join"), new_request()[1]
                        for _ in range(25):
                            received = asked(encode(join_of(new_secret(), request)), timeout=5.0)
                            reasons.append(doors.Refusal(msgspec.msgpack.decode(received)["reason"]).reason)
                            tries += 1
                    before.set()
                right = replace(at.invite(), addresses=(elsewhere,))
                with pytest.raises(UsageError, match="too many wrong invitations"):
                    at.join(right)
                return reasons

            with ThreadPoolExecutor(1) as pool:
                flooding = pool.submit(flood)
                assert before.wait(WAIT_S)
                at.join(invitation)
                reasons = flooding.result(WAIT_S * 2)
            assert Counter(reasons) == {rosters.UNKNOWN: 5, rosters.LOCKED: 195}
            assert reasons[:5] == [rosters.UNKNOWN] * 5
            assert Counter(at.reasons()) == {rosters.UNKNOWN: 5, rosters.LOCKED: 196}

    in_child(body)


def test_a_crowd_of_one_network_leaves_room_for_a_joiner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "LIMITS", SHORT)

    def body() -> None:
        with opened(tmp_path) as at, ThreadPoolExecutor(60) as pool:
            crowd = [pool.submit(send, at.gate.address, b"", False, "127.0.0.2") for _ in range(60)]
            assert at.settled(60 - listeners.MOST_OF_NETWORK) == [refusals.CROWDED] * (60 - listeners.MOST_OF_NETWORK)
            at.join()
            assert [one.result(20.0)[0] for one in crowd] == [b""] * 60
            assert Counter(at.settled(60))[refusals.SLOW] == listeners.MOST_OF_NETWORK

    in_child(body)


def test_a_crowd_from_everywhere_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MOST", 3)
    monkeypatch.setattr(doors, "LIMITS", SHORT)

    def body() -> None:
        with opened(tmp_path) as at, ThreadPoolExecutor(8) as pool:
            crowd = [pool.submit(send, at.gate.address, b"", False, f"127.0.1.{k}") for k in range(1, 9)]
            assert at.settled(5) == [refusals.CROWDED] * 5
            at.join()  # comes again until the slow ones are cut
            assert len([one.result(20.0) for one in crowd]) == 8

    in_child(body)


# --- any bytes


FIELDS = st.dictionaries(
    st.sampled_from(["roundelay", "torch", "secret", "request", "type"]),
    st.one_of(
        st.none(),
        st.integers(-(2**63), 2**64 - 1),
        st.text(max_size=90),
        st.binary(max_size=40),
        st.lists(st.booleans()),
    ),
)
BYTES = st.one_of(st.binary(max_size=80), FIELDS.map(msgspec.msgpack.encode))


@given(BYTES)
def test_bytes_are_a_call_or_none(received: bytes) -> None:
    join = decode_join(received)
    assert join is None or decode_join(encode(join)) == join


def test_nesting_without_end_is_no_call() -> None:
    assert decode_join(b"\x91" * MAX_BYTES) is None
    assert decode_join(b"\x81\xa6secret" * 1000) is None


def test_any_bytes_are_answered_or_refused_and_the_door_stays_open(tmp_path: Path) -> None:
    def body() -> int:
        with opened(tmp_path) as at:
            codes: Counter[str] = Counter()

            @settings(max_examples=60)
            @given(BYTES)
            def knock_with(received: bytes) -> None:
                codes[call(at.gate.address, received, root=at.door._certificate)[0]] += 1

            knock_with()
            at.join()
            assert set(codes) <= {"INVALID_ARGUMENT", "let in"}
            assert set(at.log.counts) <= {refusals.UNREADABLE, rosters.UNKNOWN}
            return sum(codes.values())

    assert in_child(body) >= 60


# --- parts


def test_the_file_of_refusals_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "refused.jsonl"
    for _ in range(2):  # the second time it is full from the beginning
        log = refusals.RefusalLog(path, clock=lambda: 1_800_000_000.1234)
        for _ in range(100):
            log.refuse("192.0.2.1:5", refusals.SLOW)
        log.close()
        log.close()
        log.refuse("192.0.2.1:5", refusals.SLOW)
        assert log.counts == {refusals.SLOW: 101}
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert 500 < len(path.read_bytes()) <= 1000
    assert lines[0] == {"time": 1_800_000_000.123, "peer": "192.0.2.1:5", "reason": refusals.SLOW}
    assert [line["reason"] for line in lines].count(refusals.FULL) == 1
    assert lines[-1]["reason"] == refusals.FULL


def test_a_full_disk_loses_refusals_and_ends_nothing() -> None:
    log = refusals.RefusalLog(Path("/dev/full"))
    log.refuse("192.0.2.1:5", refusals.SLOW)
    assert log.counts == {refusals.SLOW: 1, "unwritten": 1}
    log.close()


def test_only_reasons_of_the_list_are_written(tmp_path: Path) -> None:
    log = refusals.RefusalLog(tmp_path / "refused.jsonl")
    with pytest.raises(AssertionError):
        log.refuse("192.0.2.1:5", "whatever the peer says")
    log.close()
    with pytest.raises(RoundelayError, match="writing"):
        refusals.RefusalLog(tmp_path / "absent" / "refused.jsonl")


def test_what_takes_too_long_in_the_loop_is_cancelled() -> None:
    loop = LoopThread("peers")
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await doors.asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(DeadlineError, match="thread peers"):
        loop.run(wait(), 0.05)
    assert cancelled.wait(WAIT_S)
    loop.close()
    loop.close()


def test_the_door_s_certificate_is_its_own_and_valid_now(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            first, last = validity_of(at.door._certificate)
            assert first < doors.datetime.now(doors.UTC) < last
            assert not is_issued_to(at.door._certificate, OURS.certificate, at.door._key)

    in_child(body)


def test_a_refusal_names_no_version_to_who_knows_no_secret(tmp_path: Path) -> None:
    def body() -> None:
        with opened(tmp_path) as at:
            join = Join("0.0.9", "1.0", new_secret(), REQUEST)
            assert at.door._decide(join, "192.0.2.1", time.time()) == Refusal(rosters.UNKNOWN)

    in_child(body)
