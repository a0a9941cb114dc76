"""The line on which the leader hears the others, and all hear who is silent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch

from roundelay.errors import DeadlineError, RoundelayError
from roundelay.runtime import line
from roundelay.runtime.line import Line, message_of, report_of
from roundelay.runtime.report import Report
from roundelay.transport.contract import Delivery, Endpoint, Granted, Message
from roundelay.transport.memory import memory_endpoints


class Ends:
    """Connections of three processes, and what they hear."""

    def __init__(self) -> None:
        self.reports, self.beats = memory_endpoints(3), memory_endpoints(3)
        self.heard: list[tuple[int, str]] = []
        self.lost: list[str] = []
        self.killed: list[tuple[int, int]] = []
        self._lines: list[Line] = []

    def open(self, rank: int, beats: Endpoint | None = None) -> Line:
        """The line of one process: 0 watches the others, who watch 0."""

        def kill(other: int) -> bool:
            self.killed.append((rank, other))
            return True

        def lost(other: int, error: RoundelayError) -> None:
            self.lost.append(f"{rank}: {error.subject}: {error.got}")

        opened = Line(
            self.reports[rank],
            beats or self.beats[rank],
            (1, 2) if rank == 0 else (0,),
            kill,
            lambda report: self.heard.append((rank, report.kind)),
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
    """Beats ten times faster than in earnest."""
    monkeypatch.setattr(line, "BEAT_S", 0.1)
    monkeypatch.setattr(line, "SILENT_S", 0.5)
    made = Ends()
    with contextlib.closing(made):
        yield made


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_report_arrives_as_it_was_sent() -> None:
    tensors = {"w": torch.randn(3, 4).t(), "b": torch.tensor(7), "h": torch.randn(2).bfloat16(), "e": torch.zeros(0, 2)}
    sent = Report("state", 2, {"loss": 0.1 + 0.2, "numbers": [1, None, True]}, tensors)
    got = report_of(message_of(sent))
    assert (got.kind, got.worker, got.data, list(got.tensors)) == ("state", 2, sent.data, list(tensors))
    assert all(torch.equal(got.tensors[n], t) and got.tensors[n].dtype == t.dtype for n, t in tensors.items())


def test_who_beats_is_not_lost_and_who_is_silent_is_ended(ends: Ends) -> None:
    ends.open(0)
    ends.open(1)
    until(lambda: ends.lost)
    time.sleep(0.5)
    assert ends.lost == ["0: worker 2 of the launcher's: silence for 0.5 s, and was ended"]
    assert ends.killed == [(0, 2)]


def test_a_report_that_takes_long_to_read_makes_nobody_silent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the others to the leader, nor the leader to the others: the state of a large stage takes seconds."""

    def slowly(message: Message) -> Report:
        time.sleep(1.5)
        return report_of(message)

    monkeypatch.setattr(line, "report_of", slowly)
    lines = [ends.open(rank) for rank in range(3)]
    lines[1].send(Report("progress", 1, {}))
    until(lambda: ends.heard)
    assert (ends.heard, ends.lost) == ([(0, "progress")], [])


def test_beats_do_not_wait_behind_reports(ends: Ends) -> None:
    """On the connections of the reports, where one that is large may be on its way for long."""
    ends.reports = [cast(Endpoint, Clogged(endpoint)) for endpoint in ends.reports]  # type: ignore[misc]
    lines = [ends.open(rank) for rank in range(3)]
    lines[1].send(Report("progress", 1, {}))
    time.sleep(1.5)
    assert (ends.heard, ends.lost) == ([], [])


class Clogged:
    """Nothing comes through it."""

    def __init__(self, inner: Endpoint) -> None:
        self.worker, self.send, self.grant, self.abort = inner.worker, inner.send, inner.send, inner.abort

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

    def fails(message: Message) -> Report:
        raise MemoryError("no room")

    monkeypatch.setattr(line, "report_of", fails)
    lines = [ends.open(rank) for rank in range(3)]
    lines[1].send(Report("progress", 1, {}))
    until(lambda: ends.lost)
    assert ends.lost == ["0: the control line of worker 0: MemoryError: no room"]


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
    assert ends.killed == []
