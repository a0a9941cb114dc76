"""The members' service: who says what is not its own is refused by its reason, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from roundelay.errors import RoundelayError, UsageError, WorkerLostError
from roundelay.peers import member_store
from roundelay.peers import members as service
from roundelay.peers.gate import Gate
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.member_store import MemberStore
from roundelay.peers.members import HOST_NAME, Members
from roundelay.trust.authority import HOST
from tests.peers.strangers import OURS, in_child

SOON_S = 0.5
WITHOUT_DATA = "grpc.http2.min_ping_interval_without_data_ms"


@dataclass
class Serving:
    """A service with two members."""

    members: Members
    one: MemberStore
    two: MemberStore
    refused: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def cut(self, member: str) -> None:
        """End a member's connection."""
        listener = self.members._gate.listener
        for task, visit in listener._tasks.copy().items():
            if visit.stays and cast(partial[None], visit.ended).args == (member,):
                self.members._loop.soon(task.cancel)

    def goes_on(self) -> None:
        """What one says, the other hears."""
        name = f"still {time.monotonic_ns()} worker-1"
        self.one.put(name, "here")
        assert (self.two.get(name, 5.0), self.members.get(name, 5.0)) == ("here", "here")


@contextmanager
def serving() -> Iterator[Serving]:
    loop, refused, left = LoopThread("peers"), list[str](), list[str]()
    gate = Gate(loop, lambda peer, reason: refused.append(reason))
    own = OURS.issue(HOST_NAME, HOST)
    members = Members(own, gate, lambda peer, reason: refused.append(reason), left.append)
    one, two = (MemberStore(gate.address, OURS.issue(name), name, loop) for name in ("worker-1", "worker-2"))
    try:
        yield Serving(members, one, two, refused, left)
    finally:
        for each in (one, two, members, gate, loop):
            each.close()


def another_s_name(at: Serving) -> None:
    at.one.put("ready worker-2", "")


def the_host_s(at: Serving) -> None:
    at.one.put("use", "{}")


def a_longer_name(at: Serving) -> None:
    at.one.put("ready sworker-1", "")


def twice(at: Serving) -> None:
    at.one.put("ready worker-1", "first")
    at.one.put("ready worker-1", "second")


def too_many(at: Serving) -> None:
    for k in range(service.MOST_TEXTS + 1):
        at.one.put(f"text {k} worker-1", "")


def too_long(at: Serving) -> None:
    at.one.put("long worker-1", "x" * service.MOST_BYTES)


def no_name(at: Serving) -> None:
    at.one.put("a\nb worker-1", "")


REFUSED: dict[Callable[[Serving], None], str] = {
    another_s_name: service.NOT_YOURS,
    the_host_s: service.NOT_YOURS,
    a_longer_name: service.NOT_YOURS,
    twice: service.SAID,
    too_many: service.TOO_MANY,
    too_long: service.OVERSIZE,
    no_name: service.UNREADABLE,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_member_must_not_say_is_refused_by_its_reason(what: Callable[[Serving], None]) -> None:
    def body() -> None:
        with serving() as at:
            with pytest.raises(UsageError) as caught:
                what(at)
            assert (caught.value.got, at.refused) == (REFUSED[what], [REFUSED[what]])
            if what is too_many:
                at.two.put("still worker-2", "here")
                assert at.one.get("still worker-2", 5.0) == "here"
            else:
                at.goes_on()
            if what is twice:
                assert at.two.get("ready worker-1", 5.0) == "first"
            if what in (another_s_name, the_host_s):
                with pytest.raises(RoundelayError):
                    at.members.get("ready worker-2" if what is another_s_name else "use", SOON_S)

    in_child(body)


def test_a_text_that_never_comes_is_not_waited_for_beyond_the_deadline() -> None:
    def body() -> None:
        with serving() as at:
            began = time.monotonic()
            with pytest.raises(WorkerLostError, match=r"no nothing worker-2 within 0\.5 s"):
                at.one.get("nothing worker-2", SOON_S)
            assert time.monotonic() - began < 5.0
            assert at.refused == []
            at.goes_on()
            at.two.put("nothing worker-2", "late")
            assert at.one.get("nothing worker-2", 5.0) == "late"

    in_child(body)


def test_a_member_takes_its_own_files_only() -> None:
    def body() -> None:
        with serving() as at:
            at.members.leave("worker-2", "state", b"secret")
            for name in ("state", "state worker-2", "worker-2", "worker-2 state"):
                with pytest.raises(WorkerLostError, match=f"no {name} within 0.5 s"):
                    at.one.take(name, 100, SOON_S)
            assert at.two.take("state", 100, 5.0) == b"secret"
            with pytest.raises(UsageError, match="6 bytes"):
                at.two.take("state", 5, 5.0)
            at.members.leave("worker-1", "state", b"own")
            assert at.one.take("state", 100, 5.0) == b"own"
            at.goes_on()

    in_child(body)


def test_who_waits_for_long_is_not_taken_for_one_who_floods(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if minutes passed: pings come a hundred times as often, and may."""
    monkeypatch.setitem(member_store._OPTIONS, "grpc.keepalive_time_ms", service.PING_MS // 100)
    monkeypatch.setitem(service.OPTIONS, WITHOUT_DATA, service.OPTIONS[WITHOUT_DATA] // 100)

    def body() -> None:
        with serving() as at, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(at.one.take, "verdict", 100, 30.0)
            time.sleep(6.0)
            at.members.leave("worker-1", "verdict", b"go")
            assert waiting.result(5.0) == b"go"

    in_child(body)


def test_a_member_whose_connection_ends_is_told_of_and_not_waited_for() -> None:
    def body() -> None:
        with serving() as at, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(at.one.take, "verdict", 100, 30.0)
            time.sleep(SOON_S)
            assert at.left == []
            at.cut("worker-1")
            with pytest.raises(WorkerLostError, match="worker-1: got it has left"):
                at.members.get("ready worker-1", 10.0)
            assert at.left == ["worker-1"]
            with pytest.raises(WorkerLostError):
                waiting.result(5.0)
            with pytest.raises(WorkerLostError, match=r"no ready within 0\.2 s"):
                at.members.get("ready worker-2", 0.2)

    in_child(body)


def test_a_member_whose_seat_is_withdrawn_is_heard_no_more_and_learns_why() -> None:
    def body() -> None:
        with serving() as at:
            at.members.leave("worker-1", "verdict", b"why")
            at.members.withdraw("worker-1")
            for call in (lambda: at.one.put("ready worker-1", ""), lambda: at.one.get("here", 5.0)):
                with pytest.raises(UsageError, match="seat revoked"):
                    call()
            assert at.one.take("verdict", 100, 5.0) == b"why"
            assert at.refused == ["seat revoked"] * 2
            assert [visit.stays for visit in at.members._gate.listener._tasks.values()] == [False]
            at.two.put("ready worker-2", "")

    in_child(body)


def test_who_loses_its_seat_while_it_waits_for_a_text_does_not_get_it() -> None:
    def body() -> None:
        with serving() as at, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(at.one.get, "plan", 30.0)
            time.sleep(SOON_S)
            at.members.withdraw("worker-1")
            at.members.put("plan", "text")
            with pytest.raises(UsageError, match="seat revoked"):
                waiting.result(5.0)
            assert at.two.get("plan", 5.0) == "text"

    in_child(body)


def test_a_member_that_says_nothing_is_named() -> None:
    def body() -> None:
        with serving() as at, pytest.raises(WorkerLostError, match=r"worker-2: got no offer within 0\.2 s"):
            at.members.get("offer worker-2", 0.2)

    in_child(body)
