"""Who takes part in a hosted run: places are offered anew, each for its own time, whenever a machine leaves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.cli import gathering
from roundelay.cli.gathering import Gathering
from roundelay.errors import DeadlineError
from roundelay.peers.listener import Listener, Visit
from roundelay.session.offer import ENDED, OFFER, VERDICT, Offer

OWN = Offer("a" * 16, "1" * 16, 4, 4, 0.1, 0.03, 10**9)


@dataclass
class Around:
    """What a gathering talks to, without a network, and its clock."""

    now: float = 0.0
    seats: int = 0
    offers: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, bytes] = field(default_factory=dict)
    came: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    left: SimpleQueue[str] = field(default_factory=SimpleQueue)

    def leave(self, member: str, name: str, data: bytes) -> None:
        if name == VERDICT:
            self.verdicts[member] = data

    def invite(self, name: str, expiry: int) -> Any:
        self.seats += 1
        return SimpleNamespace(seat=self.seats - 1, text=lambda: "invitation")

    def joins(self, seat: int, name: str) -> None:
        """A machine comes with an invitation, and measures itself."""
        self.came.put(SimpleNamespace(number=seat))
        self.offers[f"{OFFER} {name}"] = OWN.text()


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Around:
    made = Around()
    clock = SimpleNamespace(
        monotonic=lambda: made.now, time=time.time, strftime=time.strftime, localtime=time.localtime, sleep=time.sleep
    )
    monkeypatch.setattr(gathering, "time", clock)
    monkeypatch.setattr(gathering, "unreached", lambda *given: "")
    monkeypatch.setattr(gathering, "TELL_S", 0.0)
    return made


def inviting(around: Around, wait_s: float) -> Gathering:
    texts = SimpleNamespace(
        leave=around.leave, find=around.offers.get, drop=lambda *given: None, withdraw=lambda name: None
    )
    door = SimpleNamespace(invite=around.invite, update=lambda change: None)
    gate = SimpleNamespace(loop=None)
    waiting: Any = SimpleNamespace(texts=texts, door=door, gate=gate, own=None, came=around.came, left=around.left)
    return Gathering(waiting, 3, OWN, wait_s, outside=False)


def test_a_machine_that_leaves_when_all_are_here_is_replaced_and_the_others_stay(around: Around) -> None:
    made = inviting(around, 100.0)
    around.joins(1, "worker-2")
    around.joins(0, "worker-1")
    assert made.gathered()[0] == ["worker-0", "worker-1", "worker-2"]
    assert made.complete()
    around.left.put("worker-1")
    assert not made.complete()
    around.left.put("worker-1")  # of a machine that has no place any more
    around.joins(2, "worker-1b")
    names, offers = made.gathered()
    assert names == ["worker-0", "worker-1b", "worker-2"]
    assert offers == [OWN] * 3
    assert made.complete()
    assert set(around.verdicts.values()) == {b""}


def test_each_invitation_is_good_for_its_own_time(around: Around) -> None:
    made = inviting(around, 100.0)
    around.now = 60.0
    around.left.put("worker-1")
    assert not made.complete()
    around.joins(2, "worker-1b")
    around.now = 101.0
    with pytest.raises(DeadlineError, match=r"1 of 2 within 100 s, without worker-2") as caught:
        made.gathered()
    assert "worker-1b" not in str(caught.value)
    assert around.verdicts == {"worker-1b": ENDED.encode()}


def test_a_connection_that_is_over_before_its_owner_is_known_has_ended() -> None:
    listener, told = Listener(lambda peer, reason: None), list[str]()
    listener._visits[40000] = Visit("127.0.0.1", 1, over=True)
    listener.stay("ipv4:127.0.0.1:40000", lambda: told.append("ended"))
    assert told == ["ended"]


@pytest.mark.parametrize(("wait_s", "told"), [(60.0, "until 12:01:"), (50_000.0, "until 2026-01-02 01:53:")])
def test_an_invitation_says_until_when_it_is_good_with_the_day_where_that_is_another(
    around: Around, wait_s: float, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noon = time.mktime((2026, 1, 1, 12, 0, 0, 0, 0, -1))
    clock: Any = gathering.time
    clock.time, clock.localtime = lambda: noon, lambda moment=noon: time.localtime(moment)
    inviting(around, wait_s)
    assert told in " ".join(capsys.readouterr().err.split())
