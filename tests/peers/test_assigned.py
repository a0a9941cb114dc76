"""What the host leaves for each machine before a run begins, how long it waits, and what it then forgets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.cli.host_command import READY_S, _assigned
from roundelay.errors import UsageError
from roundelay.session.assignment import ASSIGNMENT, READY, STATE
from roundelay.session.training import Length, Session
from roundelay.trust.authority import new_authority
from tests.equivalence.cells import OPTIMIZERS, Variant, bench

NAMES = ("worker-1", "worker-2")


@dataclass
class Texts:
    """A members' service where machines say whether they are ready, and what the host does there, in order."""

    why: str = ""
    left: dict[tuple[str, str], bytes] = field(default_factory=dict)
    waited_s: list[float] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)

    def leave(self, member: str, name: str, data: bytes) -> None:
        self.left[member, name] = data

    def get(self, name: str, deadline_s: float) -> str:
        said, member = name.split()
        assert said == READY
        assert {(member, ASSIGNMENT), (member, STATE)} <= self.left.keys(), "it cannot have fetched them"
        self.waited_s.append(deadline_s)
        self.ready.add(member)
        return self.why

    def drop(self, member: str, name: str) -> None:
        assert member in self.ready, "it may not have fetched them"
        del self.left[member, name]


def assigned(texts: Texts, bytes_per_s: float) -> int:
    """Assign the stages of three machines; return how many bytes of weights travel."""
    place = bench("skip")
    plan = place.plan(Variant("ravnest", "none", "stash"), 3, 1, "grpc")
    plan = replace(plan, edges=tuple(replace(edge, bytes_per_s=bytes_per_s) for edge in plan.edges))
    session = Session(place.job(OPTIMIZERS["momentum"]), place.captured, plan, 0, Length(steps=9))
    authority = new_authority("roundelay", datetime.now(UTC), timedelta(days=1))
    waiting: Any = SimpleNamespace(texts=texts, authority=authority, refuse=None, gate=None)
    prepared: Any = SimpleNamespace(session=session)
    sent, leave = 0, texts.leave

    def counted(member: str, name: str, data: bytes) -> None:
        nonlocal sent
        sent += len(data) if name == STATE else 0
        leave(member, name, data)

    texts.leave = counted  # type: ignore[method-assign]
    assert _assigned(prepared, waiting, ["worker-0", *NAMES]).size == 3
    return sent


def test_the_host_forgets_what_each_machine_has_fetched() -> None:
    texts = Texts()
    assert assigned(texts, 0.0) > 0
    assert texts.ready == {*NAMES}
    assert texts.left == {}


@pytest.mark.parametrize("bytes_per_s", [1.0, 100.0])
def test_the_slowest_line_has_the_time_to_carry_all_weights(bytes_per_s: float) -> None:
    texts = Texts()
    sent = assigned(texts, bytes_per_s)
    assert texts.waited_s == pytest.approx([READY_S + 3 * sent / bytes_per_s] * len(NAMES))
    unknown = Texts()
    assigned(unknown, 0.0)
    assert unknown.waited_s == [READY_S] * len(NAMES)


def test_a_machine_that_does_not_take_its_part_is_named_with_its_reason() -> None:
    with pytest.raises(UsageError, match=r"worker-1.*too little memory"):
        assigned(Texts(why="too little memory"), 0.0)
