"""The control line of a party: on it the leader hears the reports of all members, and each hears who is gone.

Reports have connections of their own, and news has: that something failed, and a beat every second, both ways. The
state of a large stage takes as long as it takes to travel and to be read, and news must not wait behind it.

A process that ends closes its connections, and one that is stopped is ended by its sentry
(:mod:`roundelay.runtime.stop_watchdog`). Beats are for what closes nothing: a host without power, a cable that is cut.
Their patience is long: a process is well though a library holds its interpreter, and all its threads, for half a
minute.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import torch

from roundelay.errors import DeadlineError, InternalError, RoundelayError, WorkerLostError
from roundelay.launchers import LEADER
from roundelay.runtime.worker_messages import Report, Reporter
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Granted, Lost, Message

BEAT_S, SILENT_S = 1.0, 60.0
"""Seconds between two beats, and seconds of silence after which a process counts as lost."""

NEWS_S = 1.0
"""Seconds in which news follows that a process has ended, when connections of another kind tell it first."""

PART_BYTES = 2**32
"""Bytes of tensors in one message of a report, whose transport takes no more than four times as many."""

OnLost = Callable[[int, RoundelayError], None]
OnDeaf = Callable[[RoundelayError], None]

_TURN_S = 0.1
_CHANNEL = 0


@final
class ControlChannel:
    """This process's end. It watches those that it depends on: the leader all, the others the leader.

    Args:
        reports: connections with those watched, for reports.
        news: connections with those watched, for what must not wait behind reports.
        watched: the others that this process depends on.
        on_report: told of every report, in threads of the line's own.
        on_lost: told once of every process that is gone, of those that are watched.
        on_deaf: told if this process can hear no more; it can be heard still.
    """

    def __init__(
        self,
        reports: Endpoint,
        news: Endpoint,
        watched: Sequence[int],
        on_report: Reporter,
        on_lost: OnLost,
        on_deaf: OnDeaf,
    ) -> None:
        self._reports, self._news, self._watched = reports, news, tuple(watched)
        self._on_report, self._on_lost, self._on_deaf = on_report, on_lost, on_deaf
        self._silent_s = dict.fromkeys(self._watched, 0.0)  # the hearing of news alone changes it
        self._begun: dict[tuple[int, str], dict[str, torch.Tensor]] = {}  # tensors of reports whose end is to come
        self._urgent: queue.SimpleQueue[Message] = queue.SimpleQueue()  # sent by the thread that beats
        self._leaving: set[int] = set()  # they beat no more when they have left
        self._broken: dict[int, tuple[float, str]] = {}  # whose reports come no more, since when and why
        self._lost: set[int] = set()
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(part,), name=name, daemon=True)
            for name, part in (("reports", self._hear), ("news", self._hear_news))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, report: Report) -> None:
        """Send a report to the leader; that something failed overtakes all that is still on its way."""
        for message in messages_of(report):
            if report.kind == "failed":
                self._urgent.put(message)
            else:
                self._reports.send(LEADER, message)

    def end(self, reason: str | None) -> None:
        """Leave in good order, or with a reason."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._send_urgent()
        if reason is None:
            try:
                self._reports.close()
            except RoundelayError:  # not a signal: then nobody is to wait any more
                self._news.close()
                raise
            self._news.close()
            return
        with ThreadPoolExecutor(2) as both:  # each may wait a second for those who do not answer
            for endpoint in (self._reports, self._news):
                both.submit(endpoint.abort, reason)

    def _send_urgent(self) -> None:
        while not self._urgent.empty():
            self._news.send(LEADER, self._urgent.get())

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except RoundelayError as error:
            self._on_deaf(error)
        except Exception as error:  # else nobody would hear, or be heard, any more
            self._on_deaf(_deaf(self._reports.worker, error))

    def _hear(self) -> None:
        """Take reports. Who is lost is told by news, behind why it failed, unless it is silent on that."""
        while not self._ending.is_set():
            delivery = _next(self._reports, _TURN_S)
            if isinstance(delivery, Arrived):
                self._take(delivery)
            elif isinstance(delivery, Lost):
                lost = _lost(delivery.source, delivery.reason)
                if (cause := self._reports.cause(lost)) is not lost:  # it is this process that could not take it
                    raise cause
                self._broken[delivery.source] = (time.monotonic(), delivery.reason)

    def _hear_news(self) -> None:
        """Beat, and take beats and news."""
        beat, last = 0.0, time.monotonic()
        while not self._ending.is_set():
            self._send_urgent()
            now = time.monotonic()
            if now - beat >= BEAT_S:
                beat = now
                for other in self._watched:
                    self._news.grant(other, _CHANNEL)
            for other in self._watched:  # time in which this process could hear: it may have stood still itself
                self._silent_s[other] += min(now - last, 2 * _TURN_S)
            last = now
            wait_s = _TURN_S
            while self._take_news(wait_s) and time.monotonic() - now < BEAT_S:  # or others would miss this one's
                wait_s = 0.0
            for other in self._watched:
                if self._silent_s[other] > SILENT_S and other not in self._leaving:
                    self._lose(other, f"silence for {SILENT_S:g} s")
            for other, (since, reason) in list(self._broken.items()):
                if now - since > NEWS_S:
                    self._lose(other, reason)

    def _take_news(self, wait_s: float) -> bool:
        """Take what comes next; whether something came."""
        delivery = _next(self._news, wait_s)
        if isinstance(delivery, Arrived):
            self._take(delivery)
        elif isinstance(delivery, Lost):
            self._lose(delivery.source, delivery.reason)
        elif isinstance(delivery, Granted):
            self._silent_s[delivery.source] = 0.0
        return delivery is not None

    def _take(self, delivery: Arrived) -> None:
        report, more = report_of(delivery.message)
        tensors = self._begun.setdefault((delivery.source, report.kind), {})
        tensors.update(report.tensors)
        if more:
            return
        del self._begun[delivery.source, report.kind]
        report = Report(report.kind, report.worker, report.data, tensors)
        if report.kind in ("finished", "failed"):
            self._leaving.add(delivery.source)
        self._on_report(report)

    def _lose(self, other: int, how: str) -> None:
        """Called by the thread that hears news."""
        if other in self._watched and other not in self._lost:
            self._lost.add(other)
            self._on_lost(other, _lost(other, how))


def _next(endpoint: Endpoint, wait_s: float) -> Delivery | None:
    """What comes within `wait_s` seconds."""
    try:
        return endpoint.receive(wait_s)
    except DeadlineError:
        return None


def messages_of(report: Report) -> Iterator[Message]:
    """A report as messages: JSON as bytes, and its tensors as they are, since a stage's whole state is in some.

    Each has up to :data:`PART_BYTES` of them, or a single one that is longer.
    """
    parts: list[list[str]] = [[]]
    room = PART_BYTES
    for name, tensor in report.tensors.items():
        if parts[-1] and tensor.nbytes > room:
            parts.append([])
            room = PART_BYTES
        parts[-1].append(name)
        room -= tensor.nbytes
    for part in parts:
        text = json.dumps([report.kind, report.worker, report.data, part, part is not parts[-1]]).encode()
        tensors = (report.tensors[name].detach().cpu().contiguous() for name in part)
        yield Message(_CHANNEL, (), (torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors))


def report_of(message: Message) -> tuple[Report, bool]:
    """The report that :func:`messages_of` made, with the tensors of one part; and whether there are more."""
    text, *tensors = (value for value in message.values if isinstance(value, torch.Tensor))
    kind, worker, data, names, more = json.loads(text.numpy().tobytes())
    return Report(kind, worker, data, dict(zip(names, tensors, strict=True))), more


def _deaf(worker: int, error: Exception) -> InternalError:
    return InternalError(
        f"the control line of worker {worker}",
        got=f"{type(error).__name__}: {error}",
        expected="reports and news that it can read",
        remedy="If memory ran out, the leader holds the newest state of all stages; else report this as a bug.",
    )


def _lost(worker: int, how: str) -> WorkerLostError:
    return WorkerLostError(
        f"worker {worker} of the launcher's",
        got=how,
        expected="a process that lives and answers until the run ends",
        remedy="See that process's own output and its host; continue with `--from` the last checkpoint.",
    )
