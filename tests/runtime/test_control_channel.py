"""The line on which the leader hears the others, and each hears who is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch

from roundelay.errors import DeadlineError, RoundelayError, UserCodeError
from roundelay.launching import control_channel
from roundelay.launching.control_channel import ControlChannel, messages_of
from roundelay.runtime.processes.worker_messages import Header, Report, Reporter, decode, encode
from roundelay.transport.endpoint import Delivery, Endpoint, Granted, Message
from roundelay.transport.memory import MemoryEndpoint, memory_endpoints

STATE = Report("state", 1, {}, {"x": torch.zeros(4)})


class Ends:
    """Connections of three processes, and what they hear."""

    def __init__(self) -> None:
        self.reports, self.news = memory_endpoints(3), memory_endpoints(3)
        self.heard: list[tuple[int, str]] = []
        self.lost: list[str] = []
        self._lines: list[ControlChannel] = []

    def open(self, rank: int, news: Endpoint | None = None, on_report: Reporter | None = None) -> ControlChannel:
        """The line of one process: 0 watches the others, who watch 0."""

        def lost(other: int, error: RoundelayError) -> None:
            self.lost.append(f"{rank}: {error.subject}: {error.got}")

        opened = ControlChannel(
            self.reports[rank],
            news or self.news[rank],
            (1, 2) if rank == 0 else (0,),
            on_report or (lambda report: self.heard.append((rank, report.kind))),
            lost,
            lambda error: lost(rank, error),
        )
        self._lines.append(opened)
        return opened

    def close(self) -> None:
        """End all lines."""
        for opened in self._lines:
            opened.end("over")


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Beats ten times faster than in earnest, and nobody is lost for silence."""
    monkeypatch.setattr(control_channel, "BEAT_S", 0.1)
    monkeypatch.setattr(control_channel, "NEWS_S", 60.0)
    made = Ends()
    with contextlib.closing(made):
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of silence is too long."""
    monkeypatch.setattr(control_channel, "SILENT_S", 0.5)
    monkeypatch.setattr(control_channel, "NEWS_S", 0.5)


def message_of(report: Report) -> Message:
    """The only one."""
    (message,) = messages_of(encode(report))
    return message


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_report_arrives_as_it_was_sent(ends: Ends) -> None:
    tensors = {"w": torch.randn(3, 4).t(), "b": torch.tensor(7), "h": torch.randn(2).bfloat16(), "e": torch.zeros(0, 2)}
    sent = Report("state", 2, {"loss": 0.1 + 0.2, "numbers": [1, None, True]}, tensors)
    reports: list[Report] = []
    ends.open(0, on_report=reports.append)
    assert ends.open(2).send(sent) == "state"
    until(lambda: reports)
    (got,) = reports
    assert (got.kind, got.worker, got.data, list(got.tensors)) == ("state", 2, sent.data, list(tensors))
    assert all(torch.equal(got.tensors[n], t) and got.tensors[n].dtype == t.dtype for n, t in tensors.items())


def test_a_large_tensor_is_not_copied_on_its_way(ends: Ends) -> None:
    tensor, reports = torch.zeros(1000), list[Report]()
    ends.open(0, on_report=reports.append)
    ends.open(1).send(Report("state", 1, {}, {"x": tensor}))
    until(lambda: reports)
    assert reports[0].tensors["x"].data_ptr() == tensor.data_ptr(), "as the transport delivers it"


@pytest.mark.parametrize(
    "damaged",
    [
        Message(0, (), ()),
        Message(0, (), (1,)),
        Message(0, (), (torch.zeros(4),)),
        Message(0, (), (torch.zeros(4, dtype=torch.uint8),)),
        Message(0, (), (torch.frombuffer(bytearray(encode(Report("failed", 1, {})).header[:-1]), dtype=torch.uint8),)),
        Message(0, (), (*next(messages_of(encode(Report("state", 1, {})))).values, torch.zeros(1, dtype=torch.uint8))),
        Message(0, (), (*next(messages_of(encode(STATE))).values[:1], torch.zeros(8, dtype=torch.uint8))),
        Message(0, (), (*next(messages_of(encode(STATE))).values[:1], torch.zeros(32, dtype=torch.uint8))),
    ],
    ids=["nothing", "a number", "floats", "no header", "half a header", "a tensor too many", "half", "twice"],
)
@pytest.mark.parametrize("connection", ["reports", "news"])
def test_a_damaged_message_is_refused(ends: Ends, damaged: Message, connection: str) -> None:
    ends.open(0)
    getattr(ends, connection)[1].send(0, damaged)
    until(lambda: ends.lost)
    assert ends.heard == []
    assert ends.lost[0].startswith("0: the control channel of worker 0: "), ends.lost


def test_a_report_that_cannot_be_encoded_is_a_failure_and_urgent(ends: Ends) -> None:
    ends.reports = [cast(Endpoint, Clogged(endpoint)) for endpoint in ends.reports]  # type: ignore[misc]
    ends.open(0)
    assert ends.open(1).send(Report("progress", 1, {"x": object()})) == "failed"
    until(lambda: ends.heard)
    assert ends.heard == [(0, "failed")]


def test_a_report_that_is_cut_short_by_the_end_of_its_sender_is_dropped(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "NEWS_S", 0.5)
    ends.open(0)
    (message,) = messages_of(encode(Report("state", 1, {}, {"x": torch.zeros(3)})))
    ends.reports[1].send(0, Message(0, (), message.values[:1]))
    ends.reports[1].abort("its connection broke")
    until(lambda: ends.lost)
    assert (ends.heard, ends.lost) == ([], ["0: worker 1 of the launcher's: its connection broke"])


def test_a_large_state_travels_in_parts_and_arrives_as_one(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message has a limit; a stage's state has none."""
    monkeypatch.setattr(control_channel, "PART_BYTES", 40)
    tensors = {name: torch.randn(n) for name, n in (("a", 4), ("b", 20), ("c", 6), ("d", 5), ("e", 5))}
    sent = Report("state", 1, {"update": 3}, tensors)
    assert [len(message.values) for message in messages_of(encode(sent))] == [2, 1, 1, 2]
    got: list[Report] = []
    ends.open(0, on_report=got.append)
    ends.open(1).send(sent)
    until(lambda: got)
    assert [(report.kind, report.worker, report.data, [*report.tensors]) for report in got] == [
        ("state", 1, sent.data, [*tensors])
    ]
    assert all(torch.equal(got[0].tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.usefixtures("impatient")
def test_who_beats_is_not_lost_and_who_is_silent_is(ends: Ends) -> None:
    ends.open(0)
    ends.open(1)
    until(lambda: ends.lost)
    time.sleep(0.5)
    assert ends.lost == ["0: worker 2 of the launcher's: silence for 0.5 s"]


@pytest.mark.usefixtures("impatient")
def test_a_report_that_takes_long_to_read_makes_nobody_silent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the others to the leader, nor the leader to the others: the state of a large stage takes seconds."""

    def slowly(header: memoryview) -> Header:
        time.sleep(1.5)
        return decode(header)

    monkeypatch.setattr(control_channel, "decode", slowly)
    lines = [ends.open(rank) for rank in range(3)]
    lines[1].send(Report("progress", 1, {}))
    until(lambda: ends.heard)
    assert (ends.heard, ends.lost) == ([(0, "progress")], [])


@pytest.mark.usefixtures("impatient")
def test_news_does_not_wait_behind_reports(ends: Ends) -> None:
    """On the connections of the reports, where one that is large may be on its way for long."""
    ends.reports = [cast(Endpoint, Clogged(endpoint)) for endpoint in ends.reports]  # type: ignore[misc]
    lines = [ends.open(rank) for rank in range(3)]
    lines[1].send(Report("progress", 1, {}))
    time.sleep(1.5)
    assert (ends.heard, ends.lost) == ([], [])
    lines[1].send(Report("failed", 1, {}))
    until(lambda: ends.heard)
    assert ends.heard == [(0, "failed")]


def test_why_a_process_failed_is_heard_before_it_is_lost(ends: Ends) -> None:
    """Its end closes the connections of its reports first; the cause travels on the others."""
    ends.open(0)
    ends.reports[1].abort("it has ended")
    time.sleep(0.3)
    assert ends.lost == []
    ends.news[1].send(0, message_of(Report("failed", 1, {})))
    ends.news[1].abort("it has ended")
    until(lambda: ends.lost)
    assert (ends.heard, ends.lost) == ([(0, "failed")], ["0: worker 1 of the launcher's: it has ended"])


def test_a_process_whose_reports_alone_break_is_lost(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the leader would wait for them without an end."""
    monkeypatch.setattr(control_channel, "NEWS_S", 0.5)
    ends.open(0)
    ends.reports[1].abort("its connection broke")
    until(lambda: ends.lost)
    assert ends.lost == ["0: worker 1 of the launcher's: its connection broke"]


def test_a_process_that_cannot_take_a_report_blames_itself(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transport takes messages in threads of its own and finds no memory for one."""
    no_room = UserCodeError("worker 0", got="out of memory", expected="memory", remedy="Buy some.")
    monkeypatch.setattr(ends.reports[0], "cause", lambda error: no_room)
    ends.open(0)
    ends.reports[1].abort("its message had no room")
    until(lambda: ends.lost)
    assert ends.lost == ["0: worker 0: out of memory"]


class Clogged:
    """Nothing comes through it."""

    def __init__(self, inner: Endpoint) -> None:
        self.worker, self.send, self.abort = inner.worker, inner.send, inner.abort

    def receive(self, timeout_s: float) -> Delivery:
        time.sleep(timeout_s)
        raise DeadlineError("the line", got="nothing", expected="a delivery", remedy="Wait.")


def test_whoever_always_hears_something_beats_all_the_same(ends: Ends) -> None:
    class Flooded:
        beats = 0

        def receive(self, timeout_s: float) -> Delivery:
            time.sleep(0.001)
            return Granted(1, 0)

        def grant(self, other: int, channel: int) -> None:
            self.beats += 1

        def abort(self, reason: str) -> None:
            pass

    flooded = Flooded()
    ends.open(0, cast(Endpoint, flooded))
    until(lambda: flooded.beats > 6)
    assert flooded.beats > 6


def test_a_report_that_cannot_be_read_is_told(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would hear the others any more."""

    def fails(header: memoryview) -> Header:
        raise MemoryError("no room")

    monkeypatch.setattr(control_channel, "decode", fails)
    lines = [ends.open(rank) for rank in range(3)]
    lines[1].send(Report("progress", 1, {}))
    until(lambda: ends.lost)
    assert ends.lost == ["0: the control channel of worker 0: MemoryError: no room"]


@pytest.mark.usefixtures("impatient")
def test_who_has_told_its_end_may_fall_silent_and_who_leaves_with_a_reason_is_lost(ends: Ends) -> None:
    ends.open(0)
    finished = ends.open(1)
    leaves = ends.open(2)
    finished.send(Report("finished", 1, {}))
    until(lambda: ends.heard)
    finished.end(None)
    leaves.end("it was ended")
    until(lambda: ends.lost)
    time.sleep(0.8)
    assert ends.lost == ["0: worker 2 of the launcher's: it was ended"]


def test_who_is_killed_behind_its_last_report_is_lost(ends: Ends) -> None:
    """Its launcher ends all then: that is the cause to tell."""
    ends.open(0)
    ends.reports[1].send(0, message_of(Report("finished", 1, {})))
    until(lambda: ends.heard)
    ends.news[1].abort("its connection broke")
    until(lambda: ends.lost)
    assert ends.lost[:1] == ["0: worker 1 of the launcher's: its connection broke"]


def test_a_verdict_does_not_wait_for_who_is_lost(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a cut cable, for one: it would not answer."""
    monkeypatch.setattr(MemoryEndpoint, "_close", lambda endpoint: pytest.fail("it waits for an answer"))
    leader = ends.open(0)
    told: list[int] = []
    ends.open(1, on_report=lambda report: told.append(report.data["code"]))
    ends.news[2].abort("its connection broke")
    until(lambda: ends.lost)
    leader.conclude(3)
    until(lambda: told)
    assert told == [3]


@pytest.mark.parametrize("late", ["reports", "news"])
def test_an_end_in_good_order_closes_both_though_one_is_late(
    ends: Ends, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []

    def close(endpoint: MemoryEndpoint) -> None:
        closed.append(endpoint)
        if endpoint is getattr(ends, late)[1]:
            raise DeadlineError("worker 1 closing", got="no answer", expected="one", remedy="Wait.")

    monkeypatch.setattr(MemoryEndpoint, "_close", close)
    with pytest.raises(DeadlineError):
        ends.open(1).end(None)
    assert closed == [ends.reports[1], ends.news[1]]
