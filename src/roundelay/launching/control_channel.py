"""The control channel of a process group: reports to the leader, and detection of lost processes in both directions.

Reports and urgent messages (failures, and a heartbeat every second) use separate connections, so that an urgent message
does not wait for the state of a large stage.

A process that ends closes its connections, and one that stays stopped is killed by its watchdog
(:mod:`roundelay.launching.stop_watchdog`). A host without power, or behind a cut cable, closes none: the system does,
as nothing acknowledges the heartbeats (:mod:`roundelay.launching.silent_hosts`). Their own timeout is long: in a
healthy process a library may hold the interpreter, and all threads, for half a minute.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch

from roundelay.detect_launcher import LEADER
from roundelay.errors import DeadlineError, InternalError, RoundelayError, WorkerLostError
from roundelay.runtime.processes.worker_messages import Encoded, Header, Kind, Report, Reporter, decode, encode
from roundelay.runtime.report_data import MOST_BYTES, check_data, check_header
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Granted, Lost, Message

BEAT_S, SILENT_S = 1.0, 60.0
"""Seconds between two heartbeats, and seconds without one after which a process counts as lost."""

NEWS_S = 1.0
"""Seconds to wait for the urgent connection to explain why another connection of a process has broken."""

PART_BYTES = 2**32
"""Bytes of tensors in one message of a report, whose transport takes no more than four times as many."""

LEADER_TELLS = "the run has failed; worker 0 tells why"
"""Reason of an end after which the other processes say nothing."""

OnLost = Callable[[int, RoundelayError], None]
OnUnreadable = Callable[[RoundelayError], None]
Loss = Callable[[int, str], RoundelayError]
"""The error of a process that is lost, by its rank and by what is known of it."""

_POLL_S = 0.1
_CHANNEL = 0


def launched_loss(worker: int, how: str) -> RoundelayError:
    """The error of a launcher's process that is lost."""
    return WorkerLostError(
        f"worker {worker} of the launcher's",
        got=how,
        expected="a process that answers until the run ends",
        remedy="Check that process's output and its host; continue with `--from` the last checkpoint.",
    )


@final
@dataclass(frozen=True, slots=True)
class Others:
    """What is thought of the other processes.

    Args:
        loss: the error of one that is lost.
        most_bytes: of a report's tensors, where they are strangers' and what they report is checked: whoever reports
            what cannot be is lost. None: they are trusted.
    """

    loss: Loss = launched_loss
    most_bytes: int | None = None


_LAUNCHED = Others()


@final
class ControlChannel:
    """This process's end of the channel. The leader watches all other processes, and these watch the leader.

    Args:
        reports: connections with the watched processes, for reports.
        news: connections with the watched processes, for urgent messages.
        watched: ranks of the processes that this one depends on.
        on_report: called with every report, in threads of the channel.
        on_lost: called once for every watched process that is lost.
        on_unreadable: called if this process can no longer receive; it can still send.
        others: what is thought of them; by default they are a launcher's.
    """

    def __init__(
        self,
        reports: Endpoint,
        news: Endpoint,
        watched: Sequence[int],
        on_report: Reporter,
        on_lost: OnLost,
        on_unreadable: OnUnreadable,
        others: Others = _LAUNCHED,
    ) -> None:
        self._most_bytes = others.most_bytes
        self._reports, self._news, self._watched = reports, news, tuple(watched)
        self._on_report, self._on_lost, self._on_unreadable = on_report, on_lost, on_unreadable
        self._loss = others.loss
        self._silent_s = dict.fromkeys(self._watched, 0.0)  # written by the news thread only

        self._urgent: queue.SimpleQueue[Message] = queue.SimpleQueue()  # sent by the news thread
        self._leaving: set[int] = set()  # have sent their last report; may stop their heartbeats
        self._broken: dict[int, tuple[float, str]] = {}  # whose report connection broke: since when, and why
        self._lost: set[int] = set()
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(part,), name=name, daemon=True)
            for name, part in (("reports", self._receive_reports), ("news", self._receive_news))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, report: Report) -> Kind:
        """Send a report to the leader; a failure overtakes all reports that are still being sent.

        Returns:
            the kind of what was sent: a failure, if the report could not be encoded.
        """
        encoded = encode(report)
        for message in messages_of(encoded):
            if encoded.kind == "failed":
                self._urgent.put(message)
            else:
                self._reports.send(LEADER, message)
        return encoded.kind

    def conclude(self, code: int) -> None:
        """Tell the watched processes, as the leader, the exit code with which to end, and close.

        If one is lost, its answer is not waited for.
        """
        (message,) = messages_of(encode(Report("verdict", LEADER, {"code": code})))
        for other in self._watched:
            self._reports.send(other, message)
        self.end(LEADER_TELLS if self._lost else None)

    def end(self, reason: str | None) -> None:
        """Close the channel in good order, or abort it with a reason."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._send_urgent()
        if reason is None:
            try:
                self._reports.close()
            except RoundelayError:  # but not after a signal: then nothing is waited for
                self._news.close()
                raise
            self._news.close()
            return
        with ThreadPoolExecutor(2) as both:  # each may wait a second for processes that do not answer
            for endpoint in (self._reports, self._news):
                both.submit(endpoint.abort, reason)

    def _send_urgent(self) -> None:
        while not self._urgent.empty():
            self._news.send(LEADER, self._urgent.get())

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except RoundelayError as error:
            self._on_unreadable(error)
        except Exception as error:  # otherwise the channel would stop silently
            self._on_unreadable(_unreadable(self._reports.worker, error))

    def _receive_reports(self) -> None:
        """Receive reports. Losses are reported by the news thread, after the failure report if there is one."""
        pending: dict[int, _Incoming] = {}
        while not self._ending.is_set():
            delivery = _next(self._reports, _POLL_S)
            if isinstance(delivery, Arrived):
                incoming = pending.pop(delivery.source, None) or _Incoming(delivery.source, self._most_bytes)
                try:
                    if (report := incoming.report(delivery.message)) is None:
                        pending[delivery.source] = incoming
                    elif delivery.source not in self._broken:
                        self._take_report(delivery.source, report)
                except (ValueError, RuntimeError) as error:
                    self._doubt(delivery.source, error)
            elif isinstance(delivery, Lost):
                lost = self._loss(delivery.source, delivery.reason)
                if (cause := self._reports.cause(lost)) is not lost:  # this process itself could not receive
                    raise cause
                self._broken[delivery.source] = (time.monotonic(), delivery.reason)

    def _receive_news(self) -> None:
        """Send heartbeats; receive heartbeats and urgent reports."""
        beat, last = 0.0, time.monotonic()
        while not self._ending.is_set():
            self._send_urgent()
            now = time.monotonic()
            if now - beat >= BEAT_S:
                beat = now
                for other in self._watched:
                    self._news.grant(other, _CHANNEL)
            for other in self._watched:  # count only time in which this process itself was running
                self._silent_s[other] += min(now - last, 2 * _POLL_S)
            last = now
            wait_s = _POLL_S
            while self._take_news(wait_s) and time.monotonic() - now < BEAT_S:  # the next heartbeat is due
                wait_s = 0.0
            for other in self._watched:
                if self._silent_s[other] > SILENT_S and other not in self._leaving:
                    self._lose(other, f"silence for {SILENT_S:g} s")
            for other, (since, reason) in list(self._broken.items()):
                if now - since > NEWS_S:
                    self._lose(other, reason)

    def _take_news(self, wait_s: float) -> bool:
        """Receive the next delivery; return whether there was one."""
        delivery = _next(self._news, wait_s)
        if isinstance(delivery, Arrived):
            try:
                if report := _Incoming(delivery.source, self._most_bytes).report(delivery.message):  # a failure is one
                    self._take_report(delivery.source, report)
            except (ValueError, RuntimeError) as error:
                self._doubt(delivery.source, error)
        elif isinstance(delivery, Lost):
            self._lose(delivery.source, delivery.reason)
        elif isinstance(delivery, Granted):
            self._silent_s[delivery.source] = 0.0
        return delivery is not None

    def _doubt(self, source: int, error: Exception) -> None:
        """Lose a stranger that reports what cannot be."""
        if self._most_bytes is None:
            raise error
        self._broken.setdefault(source, (time.monotonic() - NEWS_S, f"a report that cannot be true ({error})"))

    def _take_report(self, source: int, report: Report) -> None:
        if report.kind in ("finished", "failed"):
            self._leaving.add(source)
        self._on_report(report)

    def _lose(self, other: int, how: str) -> None:
        """Report a lost process once; called by the news thread."""
        if other in self._watched and other not in self._lost:
            self._lost.add(other)
            self._on_lost(other, self._loss(other, how))


def _next(endpoint: Endpoint, wait_s: float) -> Delivery | None:
    """Return the next delivery; None if there is none within `wait_s` seconds."""
    try:
        return endpoint.receive(wait_s)
    except DeadlineError:
        return None


def messages_of(encoded: Encoded) -> Iterator[Message]:
    """Yield the messages of an encoded report: the header, then the buffers.

    Each message has up to :data:`PART_BYTES` of buffers, or a single longer one.
    """
    part, room = [torch.frombuffer(bytearray(encoded.header), dtype=torch.uint8)], PART_BYTES
    for buffer in encoded.buffers:
        if room < buffer.nbytes and room < PART_BYTES:
            yield Message(_CHANNEL, (), tuple(part))
            part, room = [], PART_BYTES
        part.append(buffer)
        room -= buffer.nbytes
    yield Message(_CHANNEL, (), tuple(part))


@final
class _Incoming:
    """A report whose messages are arriving.

    Args:
        source: who sends them.
        most_bytes: as for the channel.
    """

    def __init__(self, source: int, most_bytes: int | None) -> None:
        self._source, self._most_bytes = source, most_bytes
        self._header: Header | None = None
        self._buffers: list[torch.Tensor] = []

    def report(self, message: Message) -> Report | None:
        """Take the next message; return the report once it is complete.

        Raises:
            ValueError, RuntimeError: the message is damaged.
        """
        values = [value for value in message.values if isinstance(value, torch.Tensor)]
        if len(values) != len(message.values) or not values:
            raise ValueError("a message of a report that does not consist of bytes")
        if self._header is None:
            self._header = self._decoded(values.pop(0).numpy().data)
        self._buffers += values
        if len(self._buffers) < len(self._header.tensors):
            return None
        report = self._header.report(self._buffers)
        if self._most_bytes is not None:
            check_data(report)
        return report

    def _decoded(self, data: memoryview) -> Header:
        if self._most_bytes is None:
            return decode(data)
        if len(data) > MOST_BYTES:
            raise ValueError(f"{len(data):,} bytes of numbers")
        header = decode(data)
        check_header(header, self._source, self._most_bytes)
        return header


def _unreadable(worker: int, error: Exception) -> InternalError:
    return InternalError(
        f"the control channel of worker {worker}",
        got=f"{type(error).__name__}: {error}",
        expected="messages that it can read",
        remedy="If memory ran out, the leader holds the newest state of all stages; else report this as a bug.",
    )
