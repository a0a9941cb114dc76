"""A member of a party that does not lead, and the line on which the leader hears the others."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from roundelay.debug import Launched
from roundelay.errors import DeadlineError
from roundelay.runtime import party as members
from roundelay.runtime.party import Party, attend
from roundelay.runtime.report import Report, Reporter
from roundelay.runtime.worker import Task, unchanged
from roundelay.transport.contract import Arrived, Endpoint, Granted, Message
from roundelay.transport.memory import memory_endpoints
from roundelay.transport.queues import next_item


class _Member:
    """Worker 1 of two, whose connections are queues."""

    rank, leads, others = 1, False, (0,)

    def __init__(self) -> None:
        self.ends = [memory_endpoints(2), memory_endpoints(2)]

    def endpoint(self, line: str, deadline_s: float) -> Endpoint:
        return self.ends[0][1]

    def data(self, plan: object, device: object) -> Endpoint:
        return self.ends[1][1]

    def tell_where(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["finished", "failed"])
def test_a_member_does_not_end_before_its_worker_has_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def tells_and_leaves_late(task: Task, rank: int, endpoint: Endpoint, report: Reporter, device: object) -> None:
        report(Report(kind, rank, {}))
        time.sleep(0.3)
        endpoint.abort("it has left")
        left.set()

    monkeypatch.setattr(members, "work", tells_and_leaves_late)
    member = _Member()
    threading.Thread(target=member.ends[0][0].close, daemon=True).start()  # the leader's end of the control line
    task = SimpleNamespace(plan=SimpleNamespace(devices=("cpu", "cpu"), deadline_s=10.0))
    assert attend(cast(Task, task), cast(Party, member), unchanged) == (kind == "finished")
    assert left.is_set(), "threads that outlive the main one abort the process while the interpreter shuts down"


class _Control:
    """The leader's end of the control line; workers 1 and 2 beat."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Granted | Arrived] = queue.SimpleQueue()
        self.beats = 0

    def receive(self, timeout_s: float) -> Granted | Arrived:
        try:
            return next_item(self.queue, timeout_s) if timeout_s else self.queue.get_nowait()
        except queue.Empty:
            raise DeadlineError("the line", got="nothing", expected="a delivery", remedy="Wait.") from None

    def grant(self, other: int, channel: int) -> None:
        self.beats += 1

    def abort(self, reason: str) -> None:
        pass


@contextlib.contextmanager
def line(monkeypatch: pytest.MonkeyPatch, read: Callable[[bytes], Report]) -> Iterator[tuple[list[str], list[int]]]:
    """What a leader's line tells, and whom it ends, of two workers that beat; one report comes, read as is said."""
    monkeypatch.setattr(members, "SILENT_S", 0.3)
    monkeypatch.setattr(members, "from_bytes", read)
    control, over = _Control(), threading.Event()
    told: list[str] = []
    ended: list[int] = []

    def end(worker: int) -> bool:
        ended.append(worker)
        return True

    def beat() -> None:
        while not over.wait(0.05):
            for worker in (1, 2):
                control.queue.put(Granted(worker, 1))

    leader = SimpleNamespace(rank=0, leads=True, others=(1, 2), tell_where=lambda: None, end=end)
    made = members._Line(
        cast(Endpoint, control), cast(Party, leader), lambda report: None, lambda worker, lost: told.append(str(lost))
    )
    beating = threading.Thread(target=beat)
    beating.start()
    control.queue.put(Arrived(1, Message(0, (), (torch.zeros(4, dtype=torch.uint8),))))
    try:
        yield told, ended
    finally:
        over.set()
        beating.join()
        made.end("over")


def test_a_report_that_takes_long_to_read_makes_nobody_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' beats wait behind it."""

    def slowly(body: bytes) -> Report:
        time.sleep(0.8)
        return Report("progress", 1, {})

    with line(monkeypatch, slowly) as (told, ended):
        time.sleep(1.2)
    assert (told, ended) == ([], [])


def test_whoever_always_hears_something_beats_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flooded(_Control):
        def receive(self, timeout_s: float) -> Granted | Arrived:
            time.sleep(0.001)
            return Granted(1, 1)

    monkeypatch.setattr(members, "BEAT_S", 0.1)
    control = Flooded()
    leader = SimpleNamespace(rank=0, leads=True, others=(1,), tell_where=lambda: None, end=lambda worker: True)
    made = members._Line(cast(Endpoint, control), cast(Party, leader), lambda report: None, lambda worker, lost: None)
    time.sleep(1.0)
    beats = control.beats
    made._ending.set()
    assert beats >= 3


def test_a_report_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would hear the others, or be heard, any more."""

    def fails(body: bytes) -> Report:
        raise MemoryError("no room")

    with line(monkeypatch, fails) as (told, ended):
        deadline = time.monotonic() + 5.0
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(told) == 1
    assert "the control line of worker 0: got MemoryError: no room" in told[0]
    assert ended == []


@pytest.mark.parametrize(
    ("host", "deputies"), [(0, [1]), (1, [0])], ids=["beside the leader, the next", "elsewhere the first"]
)
def test_a_host_has_one_deputy(host: int, deputies: list[int]) -> None:
    """It tells of a leader that is lost, where a person looks at that host alone."""
    place = Launched(
        rank=0, local_rank=0, host_rank=host, size=6, nodes=2, host="h", port=1, run="r/0", restart=0, interface="eth0"
    )
    assert [k for k in range(3) if dataclasses.replace(place, local_rank=k).deputy] == deputies
