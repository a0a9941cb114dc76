"""A process of a launched group that does not lead."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from roundelay.errors import DeadlineError, RoundelayError, UsageError, UserCodeError, WorkerLostError
from roundelay.launching import control_channel
from roundelay.launching import launched_worker as members
from roundelay.launching.control_channel import ControlChannel, OnLost, OnUnreadable, messages_of
from roundelay.launching.launched_worker import run_follower, run_leader
from roundelay.launching.process_group import ProcessGroup
from roundelay.runtime.device import Device
from roundelay.runtime.processes.worker_messages import Encoded, Header, Report, Reporter, decode, encode, failure
from roundelay.runtime.worker import Task
from roundelay.runtime.workload import unchanged
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Granted, Lost, Message
from roundelay.transport.memory import memory_endpoints


class _Member:
    """Worker 1 of two, whose connections are queues."""

    rank, launched = 1, True
    loss, attributed = ProcessGroup.loss, ProcessGroup.attributed
    last_words, without_leader = ProcessGroup.last_words, ProcessGroup.without_leader

    def __init__(self) -> None:
        self.reports, self.news, self.frames = (memory_endpoints(2) for _ in range(3))

    def control_channel(
        self, deadline_s: float, on_report: Reporter, on_lost: OnLost, on_unreadable: OnUnreadable
    ) -> ControlChannel:
        return ControlChannel(self.reports[1], self.news[1], (0,), on_report, on_lost, on_unreadable)

    def data_endpoint(self, plan: object, device: object) -> Endpoint:
        return self.frames[1]

    def told(self) -> Delivery:
        """What came to the leader's news, beside beats."""
        while isinstance(delivery := self.news[0].receive(20.0), Granted):
            pass
        return delivery


def data_of(delivery: Delivery) -> dict[str, Any]:
    """The data of the report that came in one message."""
    assert isinstance(delivery, Arrived)
    (header,) = delivery.message.values
    assert isinstance(header, torch.Tensor)
    return decode(header.numpy().data).data


ON_CPU, ON_GPUS = ("cpu", "cpu"), ("cuda:0", "cuda:1")
TASK, APART, AUDITED = (
    cast(
        Task,
        SimpleNamespace(works=(None, None), audit=audit, settings=SimpleNamespace(devices=devices, deadline_s=10.0)),
    )
    for devices, audit in ((ON_CPU, False), (ON_GPUS, False), (ON_CPU, True))
)


@pytest.mark.parametrize("kind", ["finished", "failed"])
def test_a_member_does_not_end_before_its_worker_has_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def tells_and_leaves_late(task: Task, rank: int, endpoint: Endpoint, report: Reporter, device: object) -> None:
        report(Report(kind, rank, {}))
        time.sleep(0.3)
        endpoint.abort("it has left")
        left.set()

    monkeypatch.setattr(members, "work", tells_and_leaves_late)
    assert run_follower(TASK, cast(ProcessGroup, _Member()), unchanged) == (0 if kind == "finished" else 1)
    assert left.is_set(), "threads that outlive the main one abort the process while the interpreter shuts down"


def test_a_member_that_cannot_hear_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader tells it; what the others would see of it is no cause."""

    def fails(header: memoryview) -> Header:
        raise MemoryError("no room")

    monkeypatch.setattr(control_channel, "decode", fails)
    monkeypatch.setattr(members, "work", lambda task, rank, endpoint, report, device: time.sleep(0.1))
    member = _Member()
    (message,) = messages_of(encode(Report("progress", 0, {})))
    member.reports[0].send(1, message)
    assert run_follower(TASK, cast(ProcessGroup, member), unchanged) == 1
    monkeypatch.undo()
    told = member.told()
    assert data_of(told)["subject"] == "the control channel of worker 1"


def test_a_report_that_cannot_be_sent_is_told_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state of which there is no copy to be had, for one."""

    def fails(encoded: Encoded) -> Iterator[Message]:
        if encoded.kind == "state":
            raise RuntimeError("no room")
        return messages_of(encoded)

    monkeypatch.setattr(control_channel, "messages_of", fails)
    monkeypatch.setattr(members, "work", lambda task, rank, endpoint, report, device: report(Report("state", 1, {})))
    member = _Member()
    assert run_follower(TASK, cast(ProcessGroup, member), unchanged) == 1
    told = member.told()
    data = data_of(told)
    assert f"{data['subject']}: {data['got']}".startswith("worker 1, state: RuntimeError: no room at ")


@pytest.mark.parametrize(("error", "told"), [(RuntimeError("no room"), "RuntimeError: no"), (MemoryError(), "out of")])
def test_what_goes_wrong_in_the_leader_is_told_and_ends_the_others(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it takes a state, for one: an error on its way is not hidden by the launcher's signal that follows."""

    class Leader(_Member):
        rank, size = 0, 2

        def control_channel(
            self, deadline_s: float, on_report: Reporter, on_lost: OnLost, on_unreadable: OnUnreadable
        ) -> ControlChannel:
            return ControlChannel(self.reports[0], self.news[0], (1,), on_report, on_lost, on_unreadable)

    def listen(report: Report) -> None:
        raise error

    monkeypatch.setattr(members, "work", lambda task, rank, endpoint, report, device: report(Report("state", 0, {})))
    leader = Leader()
    with pytest.raises(UserCodeError, match=told):
        run_leader(TASK, listen, unchanged, cast(ProcessGroup, leader))
    while isinstance(end := leader.news[1].receive(20.0), Granted):
        pass
    assert end == Lost(0, "the run has failed; worker 0 tells why")


def test_a_worker_that_cannot_connect_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile its process hears signals and beats."""

    def fails(plan: object, device: object) -> Endpoint:
        raise DeadlineError("worker 1 meeting the others", got="nobody", expected="two", remedy="Wait.")

    member = _Member()
    monkeypatch.setattr(member, "data_endpoint", fails)
    assert run_follower(TASK, cast(ProcessGroup, member), unchanged) == 1
    told = member.told()
    assert data_of(told)["got"] == "nobody"


@pytest.mark.parametrize(
    "start",
    [
        lambda process_group: run_leader(APART, lambda report: None, unchanged, process_group),
        lambda process_group: run_follower(APART, process_group, unchanged),
    ],
    ids=["the leader", "a member"],
)
def test_who_lacks_its_device_says_so_before_it_meets_anybody(
    start: Callable[[ProcessGroup], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would tell of a lost worker beside it."""

    def none_here(name: str, worker: int) -> Device:
        assert name == f"cuda:{member.rank}"
        raise UsageError("device cuda:7", got="none", expected="one", remedy="Name another.")

    member = _Member()
    monkeypatch.setattr(members, "make_device", none_here)
    monkeypatch.setattr(member, "control_channel", lambda *args: pytest.fail("it met the others"))
    monkeypatch.setattr(member, "size", 2, raising=False)
    with pytest.raises(UsageError, match="cuda:7"):
        start(cast(ProcessGroup, member))


def test_the_endpoint_of_who_is_ended_while_its_worker_connects_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    connects, worked = threading.Event(), threading.Event()

    def late(plan: object, device: object) -> Endpoint:
        connects.wait(10.0)
        return member.frames[1]

    member = _Member()
    monkeypatch.setattr(member, "data_endpoint", late)
    monkeypatch.setattr(members, "work", lambda task, rank, endpoint, report, device: worked.set())
    member.news[0].abort("the run has failed; worker 0 tells why")
    threading.Timer(1.0, connects.set).start()
    assert run_follower(TASK, cast(ProcessGroup, member), unchanged) == 1
    assert worked.wait(10.0)
    assert member.frames[1].aborted, "or it would wait for the others until its deadline"


def test_a_worker_that_fails_before_the_line_tells_why_does_not_hide_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own connections to a leader that is killed may break first."""
    member = _Member()

    def fails(task: Task, rank: int, endpoint: Endpoint, report: Reporter, device: object) -> None:
        threading.Timer(0.6, member.news[0].abort, ["its connection broke"]).start()
        report(failure(1, WorkerLostError("worker 0", got="an end", expected="a living worker", remedy="Look.")))

    monkeypatch.setattr(members, "NEWS_S", 20.0)
    monkeypatch.setattr(members, "work", fails)
    with pytest.raises(WorkerLostError, match="worker 0 of the launcher's: got its connection broke"):
        run_follower(TASK, cast(ProcessGroup, member), unchanged)


class _Audited:
    """An audited run in which worker 1 has finished: the leader's end of the channel, and how worker 1 ends."""

    def __init__(self) -> None:
        self.member, self.codes, self.finished = _Member(), list[object](), threading.Event()
        ends = self.member.reports[0], self.member.news[0]
        self.channel = ControlChannel(*ends, (1,), self._hear, lambda *_: None, lambda _: None)
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()
        assert self.finished.wait(10.0)

    def _hear(self, report: Report) -> None:
        if report.kind == "finished":
            self.finished.set()

    def _follow(self) -> None:
        try:
            self.codes.append(run_follower(AUDITED, cast(ProcessGroup, self.member), unchanged))
        except RoundelayError as error:
            self.codes.append(f"{error.subject} got {error.got}")


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Audited]:
    """What the worker computes is over at once."""
    monkeypatch.setattr(
        members, "work", lambda task, rank, endpoint, report, device: report(Report("finished", rank, {}))
    )
    made = _Audited()
    yield made
    made.channel.end("over")
    made.thread.join(10.0)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_member_of_an_audited_run_ends_with_what_the_leader_concludes(code: int, audited: _Audited) -> None:
    time.sleep(0.5)
    assert audited.codes == [], "it waits"
    audited.channel.conclude(code)
    audited.thread.join(10.0)
    assert audited.codes == [code]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (control_channel.LEADER_TELLS, 1),
        ("its connection broke", "worker 0 of the launcher's got its connection broke"),
    ],
)
def test_a_member_that_waits_for_a_comparison_hears_how_the_leader_ends(
    reason: str, told: object, audited: _Audited
) -> None:
    audited.channel.end(reason)
    audited.thread.join(10.0)
    assert audited.codes == [told]


def test_a_member_does_not_wait_for_ever_for_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: queue.SimpleQueue[Report] = queue.SimpleQueue()
    monkeypatch.setattr(members, "VERDICT_S", 0.3)
    with pytest.raises(DeadlineError, match="waiting for the comparison of worker 0"):
        members._verdict(verdicts, [])
