"""The control line of a party: on it the leader hears the reports of all members, and each hears who is silent.

Nobody in a party is the parent of anybody and would be told that a process is stopped, so there is a beat every second,
both ways. Beats have connections and a thread of their own: the state of a large stage takes as long as it takes to
travel and to be read, and a beat must not wait behind it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import torch

from roundelay.debug import LEADER
from roundelay.errors import DeadlineError, InternalError, RoundelayError, WorkerLostError
from roundelay.runtime.report import Report, Reporter
from roundelay.transport.contract import Arrived, Endpoint, Granted, Lost, Message

BEAT_S, SILENT_S = 1.0, 5.0
"""Seconds between two beats, and seconds of silence after which a process counts as lost."""

OnLost = Callable[[int, RoundelayError], None]
OnDeaf = Callable[[RoundelayError], None]

_TURN_S = 0.1
_CHANNEL = 0


@final
class Line:
    """This process's end. It watches those that it depends on: the leader all, the others the leader.

    Args:
        reports: connections for reports.
        beats: connections for beats.
        watched: the others that this process depends on.
        kill: ends one of them that answers no more; whether it could.
        on_report: told of every report, in a thread of the line's own.
        on_lost: told once of every process that is gone, of those that are watched.
        on_deaf: told if this process can hear no more; it can be heard still.
    """

    def __init__(
        self,
        reports: Endpoint,
        beats: Endpoint,
        watched: Sequence[int],
        kill: Callable[[int], bool],
        on_report: Reporter,
        on_lost: OnLost,
        on_deaf: OnDeaf,
    ) -> None:
        self._reports, self._beats, self._watched, self._kill = reports, beats, tuple(watched), kill
        self._on_report, self._on_lost, self._on_deaf = on_report, on_lost, on_deaf
        self._silent_s = dict.fromkeys(self._watched, 0.0)
        self._lock = threading.Lock()  # of the silences
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(part,), name=name, daemon=True)
            for name, part in (("reports", self._hear), ("beats", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, report: Report) -> None:
        """Send a report to the leader."""
        self._reports.send(LEADER, message_of(report))

    def end(self, reason: str | None) -> None:
        """Leave in good order, or with a reason."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        if reason is None:
            self._reports.close()
            self._beats.close()
            return
        with ThreadPoolExecutor(2) as both:  # each may wait a second for those who do not answer
            for endpoint in (self._reports, self._beats):
                both.submit(endpoint.abort, reason)

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # else nobody would hear, or be heard, any more
            self._on_deaf(_deaf(self._reports.worker, error))

    def _hear(self) -> None:
        while not self._ending.is_set():
            try:
                delivery = self._reports.receive(_TURN_S)
            except DeadlineError:
                continue
            if isinstance(delivery, Arrived):
                report = report_of(delivery.message)
                if report.kind in ("finished", "failed"):
                    self._unwatch(delivery.source)  # it may leave now
                self._on_report(report)
            elif isinstance(delivery, Lost):
                self._lose(delivery.source, delivery.reason)

    def _beat(self) -> None:
        beat, last = 0.0, time.monotonic()
        while not self._ending.is_set():
            now = time.monotonic()
            if now - beat >= BEAT_S:
                beat = now
                for other in self._watched:
                    self._beats.grant(other, _CHANNEL)
            with self._lock:
                for other in self._silent_s:  # time in which this process could hear: it may have been stopped itself
                    self._silent_s[other] += min(now - last, 2 * _TURN_S)
            last = now
            wait_s = _TURN_S
            while self._hear_beat(wait_s) and time.monotonic() - now < BEAT_S:  # or others would miss this one's
                wait_s = 0.0
            for other in [k for k, silent_s in self._silences() if silent_s > SILENT_S]:
                ended = ", and was ended" if self._kill(other) else ""
                self._lose(other, f"silence for {SILENT_S:g} s{ended}")

    def _hear_beat(self, wait_s: float) -> bool:
        """Take the next delivery; whether one came. Who is lost is told where the reports are heard."""
        try:
            delivery = self._beats.receive(wait_s)
        except DeadlineError:
            return False
        with self._lock:
            if isinstance(delivery, Granted) and delivery.source in self._silent_s:
                self._silent_s[delivery.source] = 0.0
        return True

    def _silences(self) -> list[tuple[int, float]]:
        with self._lock:
            return list(self._silent_s.items())

    def _unwatch(self, other: int) -> bool:
        """Whether it was watched until now."""
        with self._lock:
            return self._silent_s.pop(other, None) is not None

    def _lose(self, other: int, how: str) -> None:
        if self._unwatch(other):
            self._on_lost(other, _lost(other, how))


def message_of(report: Report) -> Message:
    """A report as a message: JSON as bytes, and its tensors as they are, since a stage's whole state is in some."""
    text = json.dumps([report.kind, report.worker, report.data, list(report.tensors)]).encode()
    tensors = (tensor.detach().cpu().contiguous() for tensor in report.tensors.values())
    return Message(_CHANNEL, (), (torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors))


def report_of(message: Message) -> Report:
    """The report that :func:`message_of` made."""
    text, *tensors = (value for value in message.values if isinstance(value, torch.Tensor))
    kind, worker, data, names = json.loads(text.numpy().tobytes())
    return Report(kind, worker, data, dict(zip(names, tensors, strict=True)))


def _deaf(worker: int, error: Exception) -> InternalError:
    return InternalError(
        f"the control line of worker {worker}",
        got=f"{type(error).__name__}: {error}",
        expected="reports and beats that it can read",
        remedy="If memory ran out, the leader holds the newest state of all stages; else report this as a bug.",
    )


def _lost(worker: int, how: str) -> WorkerLostError:
    return WorkerLostError(
        f"worker {worker} of the launcher's",
        got=how,
        expected="a process that lives and answers until the run ends",
        remedy="See that process's own output and its host; continue with `--from` the last checkpoint.",
    )
