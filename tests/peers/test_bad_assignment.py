"""A host that is not honest: whatever it sends, a machine that joins refuses it by an error of ours, or takes it."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import RoundelayError, RunError, UsageError
from roundelay.session.assignment import assignment_of, optimizer_of, place_of, read_assignment, task_of
from roundelay.session.launched_states import fetched_use
from roundelay.session.training import Length, Session
from tests.equivalence.cells import OPTIMIZERS, Variant, bench

MEMORY, RANK = 2**24, 1
NAMES = ("worker-0", "worker-1b", "worker-2")
OPENED: list[str] = []
WATCHING: list[bool] = []


def watch(event: str, details: tuple[Any, ...]) -> None:
    """Note what is opened or started while it is watched."""
    if WATCHING and event in ("open", "os.mkdir", "os.remove", "os.rename", "subprocess.Popen", "os.system"):
        OPENED.append(f"{event} {details[0]!r}"[:200])


sys.addaudithook(watch)


@cache
def honest() -> tuple[bytes, bytes]:
    """What an honest host sends to the machine in the middle of three."""
    place = bench("skip")
    plan = place.plan(Variant("ravnest", "none", "stash"), 3, 1, "grpc")
    session = Session(place.job(OPTIMIZERS["momentum"]), place.captured, plan, 0, Length(steps=9))
    return assignment_of(session, RANK, optimizer_of(session), NAMES, 0)


@cache
def plain() -> Any:
    return msgspec.msgpack.decode(honest()[0])


@contextmanager
def nothing_else() -> Iterator[None]:
    """Nothing is opened or started, and memory stays within reason."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    WATCHING.append(True)
    try:
        yield
    finally:
        WATCHING.clear()
    foreign = [name for name in OPENED if not re.search(r"\.(py|pyc|so)'|/(proc|sys)/", name)]
    OPENED.clear()
    assert foreign == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def taken(assignment: bytes, state: bytes) -> bool:
    """Whether a machine takes what it is sent."""
    with nothing_else():
        try:
            read, reading = read_assignment(assignment, NAMES[RANK], MEMORY)
            task_of(read, reading, state)
        except RoundelayError:
            return False
    return True


def test_what_an_honest_host_sends_is_taken() -> None:
    assert taken(*honest())


@st.composite
def damaged(draw: st.DrawFn, which: int) -> bytes:
    """Some bytes of it are others, missing or doubled."""
    data = bytearray(honest()[which])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        end = min(len(data), at + draw(st.integers(0, 8)))
        data[at:end] = draw(st.binary(max_size=8))
    return bytes(data)


@given(damaged(0))
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_of_an_assignment_do_no_harm(data: bytes) -> None:
    taken(data, honest()[1])


@given(damaged(1))
@settings(max_examples=200, deadline=None)
def test_damaged_bytes_of_a_state_do_no_harm(data: bytes) -> None:
    taken(honest()[0], data)


PLACES = st.integers(0, 2**16)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
ANYTHING = VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=3), VALUES, max_size=3)


def replaced(value: Any, at: list[int], new: Any) -> Any:
    """`value` with one of its leaves, or of its parts, replaced; bytes that are msgpack are opened too."""
    if isinstance(value, dict) and value and at:
        key = [*value][at[0] % len(value)]
        return {**value, key: replaced(value[key], at[1:], new)}
    if isinstance(value, list) and value and at:
        k = at[0] % len(value)
        return [*value[:k], replaced(value[k], at[1:], new), *value[k + 1 :]]
    if isinstance(value, bytes) and at:
        try:
            return msgspec.msgpack.encode(replaced(msgspec.msgpack.decode(value), at, new))
        except msgspec.DecodeError:
            return new
    return new


@given(st.lists(PLACES, min_size=1, max_size=12), ANYTHING)
@settings(max_examples=600, deadline=None)
def test_an_assignment_with_another_value_somewhere_does_no_harm(at: list[int], new: Any) -> None:
    taken(msgspec.msgpack.encode(replaced(plain(), at, new)), honest()[1])


HUGE = st.sampled_from([0, -1, 7, 1025, 10**6, 10**9, 2**31, 2**62, 2**63, 10**30])


@given(st.integers(0, 2**16), HUGE)
@settings(max_examples=300, deadline=None)
def test_a_plan_with_another_number_does_no_harm(at: int, number: int) -> None:
    plan = plain()["plan"]
    found = [*re.finditer(r"(?<=[ \[])\d+(?=[,\]\n ])", plan)]
    span = found[at % len(found)].span()
    changed = plain() | {"plan": plan[: span[0]] + str(number) + plan[span[1] :]}
    taken(msgspec.msgpack.encode(changed), honest()[1])


@pytest.mark.parametrize(
    "field", ["threads", "deadline_s", "micro_batches", "parameter_bytes", "tape_bytes", "in_flight"]
)
def test_a_huge_number_of_a_plan_is_refused(field: str) -> None:
    plan, count = re.subn(rf"^{field} = [\d.]+", f"{field} = {10**9}", plain()["plan"], flags=re.MULTILINE)
    assert count
    assert not taken(msgspec.msgpack.encode(plain() | {"plan": plan}), honest()[1])


def test_more_than_a_machine_allows_is_refused_by_its_option() -> None:
    with pytest.raises(UsageError, match="--memory-limit"):
        read_assignment(honest()[0], NAMES[RANK], 1000)


def test_what_is_for_another_machine_is_refused() -> None:
    for worker in (RANK + 1, 7):
        with pytest.raises(UsageError, match="the stages of another worker"):
            read_assignment(msgspec.msgpack.encode(plain() | {"worker": worker}), NAMES[RANK], MEMORY)
    for names in (NAMES[1:], NAMES[:1], (*NAMES[:RANK], "worker-9", *NAMES[RANK + 1 :]), (NAMES[RANK],) * len(NAMES)):
        with pytest.raises(UsageError, match="the stages of another machine"):
            read_assignment(msgspec.msgpack.encode(plain() | {"names": names}), NAMES[RANK], MEMORY)
    with pytest.raises(UsageError, match="the names of"):
        read_assignment(msgspec.msgpack.encode(plain() | {"names": (*NAMES, "worker-9")}), NAMES[RANK], MEMORY)


def test_the_size_of_messages_comes_from_the_plan() -> None:
    _, reading = read_assignment(honest()[0], NAMES[RANK], MEMORY)
    place = place_of(reading, RANK, NAMES, None, 0)  # type: ignore[arg-type]
    assert place.data_bytes < 2**21
    assert place.report_bytes < 2**28


class Told:
    """A group whose leader publishes a text."""

    restart, trusting = 0, False

    def __init__(self, text: str) -> None:
        self.text = text

    def fetch(self, name: str) -> str:
        return self.text


USE = '{"use": {"folder": "/etc", "shared": true, "buffers": [], "after_epoch": "nothing", "at_end": "everything"}, '


def test_no_path_of_the_host_s_is_opened_or_written_to() -> None:
    with nothing_else():
        use, _ = fetched_use(Told(USE + '"save_every": 1, "probe": "/etc/passwd"}'))  # type: ignore[arg-type]
    assert not use.shared


@given(st.text(max_size=40) | st.just(USE + '"save_every": "x", "probe": 3}'))
@settings(max_examples=100, deadline=None)
def test_what_is_no_text_of_a_leader_s_is_refused(text: str) -> None:
    with pytest.raises(RunError, match="what the leader says"):
        fetched_use(Told(text))  # type: ignore[arg-type]
