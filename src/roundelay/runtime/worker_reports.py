"""What a worker tells of itself: how far it is, what it has executed, and a summary at its end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import final

import torch

from roundelay.actor.machine import Run
from roundelay.ir.program import OPCODES
from roundelay.observe.digest import digest
from roundelay.observe.process_memory import private_bytes, resident_bytes
from roundelay.runtime.device import Device
from roundelay.runtime.handlers import Context
from roundelay.runtime.loading.instruction_log import InstructionLog
from roundelay.runtime.processes.worker_messages import Report, Reporter
from roundelay.runtime.stage_state import HELD
from roundelay.transport.endpoint import Endpoint

PROGRESS_S = 0.1
"""Seconds between two reports of how far a worker is."""

_AT_ONCE = 4096
"""Instructions in one report."""


@final
class WorkerReports:
    """Notes what one worker executes, and reports it. To be made before its stages, whose memory it counts.

    Args:
        worker: its number.
        report: called with reports to the launcher.
        device: where it computes.
        kept: number of micro-batches whose instructions are kept.
    """

    def __init__(self, worker: int, report: Reporter, device: Device, kept: int) -> None:
        self._worker, self._report, self._device = worker, report, device
        self._resident, self._thread = resident_bytes(), threading.get_native_id()
        self._log = InstructionLog(kept)
        self._digests: list[list[object]] = []
        self._started = self._reported = self._busy_s = 0.0
        self._updates = 0
        self._threads = 0  # intra-op threads with which the last update was computed

    def begin(self) -> None:
        """Start the clock: the stages are built."""
        self._started = time.perf_counter()

    def executed(self, run: Run, batch: int, start: float, end: float, sent: int) -> None:
        """Note an executed instruction; arguments as of :data:`~roundelay.runtime.loading.instruction_log.LogEntry`."""
        self._log.add((run, batch, start, end, sent))  # formatted at the end, when nobody waits for it
        if OPCODES[run.instruction.opcode].share != "data":
            self._busy_s += end - start

    def updated(self, run: Run, now: float) -> None:
        """Report the busy seconds after an update, at most ten times a second."""
        self._updates += 1
        self._threads = torch.get_num_threads()
        if now - self._reported > PROGRESS_S:
            self._reported = now
            busy_s = self._device.busy_s(self._busy_s)
            data = {"busy_s": busy_s, "wall_s": now - self._started, "update": run.version + 1}
            self._report(Report("progress", self._worker, data))

    def computed(self, stage: int, holder: int, kind: str, number: int, tensors: Mapping[str, object]) -> None:
        """Note a digest of what one holder of a stage has computed."""
        self._digests.append([kind, stage, holder, number, digest(tensors)])

    def tell_events(self, loads: Iterable[tuple[int, float, float]], first: int) -> None:
        """Report digests, instructions, and the batches that were read since the first of these.

        Args:
            loads: of each batch its number from ``first``, and when reading it started and ended.
            first: number of the run's first batch.
        """
        if self._digests:
            self._report(Report("digest", self._worker, {"digests": self._digests}))
        self._tell_loads(loads, first, since=self._tell_instructions())

    def _tell_instructions(self) -> float:
        """Report the instructions that are kept; returns when the first of them started."""
        timed = self._device.spans(list(self._log.events), self._log.dropped)
        events = [event for event in timed if event[0].g >= self._log.first]
        for start in range(0, len(events), _AT_ONCE):
            rows = [_row(*event) for event in events[start : start + _AT_ONCE]]
            self._report(Report("events", self._worker, {"events": rows}))
        return float(events[0][2])

    def _tell_loads(self, loads: Iterable[tuple[int, float, float]], first: int, since: float) -> None:
        read = list(loads)  # at once: the reader goes on
        if own := [[first + n, start, end] for n, start, end in read if end >= since]:
            self._report(Report("loads", self._worker, {"loads": own}))

    def finish(self, endpoint: Endpoint, contexts: Mapping[int, Context], sums: Mapping[str, object]) -> None:
        """Report the worker's end, with a summary of its run.

        Args:
            endpoint: its own.
            contexts: of its stages.
            sums: of the stages' states, at the start and at the end, if they were taken.
        """
        summary = {
            "pid": os.getpid(),
            "thread": self._thread,
            "threads": self._threads,
            "busy_s": self._device.busy_s(self._busy_s),
            "wall_s": time.perf_counter() - self._started,
            "updates": self._updates,
            "first_event_g": self._log.first,
            "device_peak_bytes": self._device.peak_bytes(),
            **{f"{when}_sums": sums.get(when) for when in ("start", "end")},
            **_sent_bytes(endpoint),
            **_of_stages(contexts),
            **_resident(self._resident),
        }
        self._report(Report("finished", self._worker, summary))


def _sent_bytes(endpoint: Endpoint) -> dict[str, object]:
    """Return the bytes that a worker has sent and received, by channel."""
    return {
        "bytes_sent": {str(c): n for c, n in endpoint.bytes_sent.items()},
        "bytes_received": {str(c): n for c, n in endpoint.bytes_received.items()},
    }


def _of_stages(contexts: Mapping[int, Context]) -> dict[str, object]:
    """Return what the stages of a worker hold, and how many of their updates were skipped."""
    return {
        "skipped": sum(context.skipped for context in contexts.values()),
        "tape_bytes": {str(k): context.stage.tape_bytes() for k, context in contexts.items()},
        "owed_bytes": {str(k): context.stage.owed_bytes() for k, context in contexts.items()},
        "held_bytes": {kind: sum(c.stage.held_bytes[kind] for c in contexts.values()) for kind in HELD},
    }


def _resident(before: tuple[int, int] | None) -> dict[str, object]:
    """Return the private bytes of this process, its resident ones before its stages were built, and its peak."""
    after = resident_bytes()
    return {
        "private_bytes": private_bytes(),
        "rss_at_start_bytes": before and before[0],
        "peak_rss_bytes": after and after[1],
    }


def _row(run: Run, batch: int, start: float, end: float, sent: int) -> list[object]:
    """Return an event in the form in which it is reported."""
    line, weights = run.instruction, (run.reads, run.distance)
    channels = list(line.takes), list(line.gives)
    return [line.opcode, run.g, batch, *weights, start, end, sent, run.stage, line.of, *channels, str(run)]
