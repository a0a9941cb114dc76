"""Runs one worker in a process that a launcher started: the leader (rank 0) or a follower.

The main thread handles the signals by which a launcher ends this process, so the worker has a thread of its own.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import final

from roundelay.errors import DeadlineError, RoundelayError, WorkerLostError
from roundelay.launching.control_channel import NEWS_S, ControlChannel
from roundelay.launching.failure_tracker import FailureTracker, Listener
from roundelay.launching.gc_policy import frozen_gc
from roundelay.launching.process_group import ProcessGroup
from roundelay.launching.rendezvous import TICK_S
from roundelay.launching.threaded_workers import take_reports
from roundelay.runtime.device import Device, make_device
from roundelay.runtime.processes.idle_resources import give_back_idle
from roundelay.runtime.processes.user_errors import out_of_memory, unexpected
from roundelay.runtime.processes.worker_messages import Report, Reporter, error_of, failure, unsendable
from roundelay.runtime.workload import Workload, Wrap, work
from roundelay.transport.checked_endpoint import next_item
from roundelay.transport.endpoint import Endpoint

LEAVE_S = 2.0
"""Seconds to wait for a failed or aborted worker to close its connections; it reports its end before."""

TOLD_S = 5.0
"""Seconds in which a host must tell a machine that has failed who is lost: it may notice a cut link later."""

VERDICT_S = 6 * 3600.0
"""Seconds that the leader may take to compare an audited run, while its heartbeats come."""

MOST_WAITING = 256
"""Most reports of other processes that wait for the leader."""

_PAUSE_S = 0.005
_ENDED = "it was ended"


@final
class _WorkerThread:
    """Runs this process's worker in a thread, which first connects it with the others.

    Args:
        task: the run.
        process_group: the group of processes.
        wrap: applied to the worker's endpoint.
        report: called with every report of the worker, its end included.
        device: where it computes.
    """

    def __init__(
        self, task: Workload, process_group: ProcessGroup, wrap: Wrap, report: Reporter, device: Device
    ) -> None:
        self._task, self._party, self._wrap, self._report, self._device = task, process_group, wrap, report, device
        self._lock = threading.Lock()
        self._until_s = math.inf
        self._endpoint: Endpoint | None = None
        self._ended = ""  # reason of an abort
        self._thread = threading.Thread(target=self._main, name=f"worker {process_group.rank}", daemon=True)
        self._thread.start()

    def abort(self, reason: str) -> None:
        """Abort the worker's connections, now or as soon as they are open."""
        with self._lock:
            self._ended = self._ended or reason
            endpoint = self._endpoint
        if endpoint is not None:
            endpoint.abort(reason)

    def join(self, seconds: float) -> None:
        """Wait until the worker has ended: gloo threads that run during interpreter shutdown abort the process.

        A second call, after the first was interrupted, does not extend the first one's deadline.
        """
        now = time.monotonic()
        self._until_s = min(self._until_s, now + seconds)
        self._thread.join(max(0.0, self._until_s - now))

    def _main(self) -> None:
        rank = self._party.rank
        try:
            endpoint = self._wrap(self._party.data_endpoint(self._task.works[rank], self._device))
        except RoundelayError as error:
            self._report(failure(rank, error))
            return
        except Exception as error:  # otherwise the worker would end without a report
            self._report(failure(rank, unexpected(f"worker {rank}", error)))
            return
        with self._lock:
            self._endpoint, ended = endpoint, self._ended
        if ended:
            endpoint.abort(ended)
        work(self._task, rank, endpoint, self._report, self._device)


def _device_of(task: Workload, process_group: ProcessGroup) -> Device:
    return make_device(task.settings.devices[process_group.rank], process_group.rank)


def run_leader(task: Workload, listen: Listener, wrap: Wrap, process_group: ProcessGroup) -> None:
    """Run worker 0 in this process and take all reports; see :func:`roundelay.launching.launch.run`.

    After an audited run the control channel stays open, until :meth:`ProcessGroup.conclude`.
    """
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    tracker = FailureTracker(process_group.size, listen)
    device = _device_of(task, process_group)  # before connecting: else the others would report a lost worker

    def failed(rank: int, error: RoundelayError) -> None:
        reports.put(failure(rank, error))

    over = threading.Event()

    def take(report: Report) -> None:
        while reports.qsize() > MOST_WAITING and not over.wait(_PAUSE_S):  # who floods is not read from
            pass
        reports.put(report)

    channel = process_group.control_channel(task.settings.deadline_s, take, failed, partial(failed, process_group.rank))
    worker = _WorkerThread(task, process_group, wrap, reports.put, device)
    causes, words = list[Report](), process_group.last_words(None)
    try:
        try:
            _take_reports(reports, tracker, process_group.rank)
        except KeyboardInterrupt:
            if process_group.launched:
                time.sleep(NEWS_S)
            _drain(reports, tracker)
            raise
        finally:
            over.set()
            causes = [f for f in tracker.failures if f.data["got"] != _ENDED]
            succeeded = not tracker.failures and len(tracker.ended) == len(task.works)
            words = process_group.last_words(sys.exception() or _cause(tracker, process_group))
            _leave(channel, worker, words, task.settings.deadline_s if succeeded else None, open_after=task.audit)
    except KeyboardInterrupt:  # a launcher that has lost one process ends the others: the loss is the cause to report
        _leave(channel, worker, words, None)  # the interrupt may have cut the first call short
        if not causes:
            raise
        tracker.failures[:] = causes
    _drain(reports, tracker)
    if (cause := _cause(tracker, process_group)) is not None:
        raise cause


def _cause(tracker: FailureTracker, process_group: ProcessGroup) -> RoundelayError | None:
    first = tracker.first_cause()
    return None if first is None else process_group.attributed(*first)


def _take_reports(reports: queue.SimpleQueue[Report], tracker: FailureTracker, rank: int) -> None:
    """Take reports until the run is over; unexpected exceptions become RoundelayErrors."""
    try:
        take_reports(reports, tracker)
    except RoundelayError:
        raise
    except MemoryError as error:
        raise out_of_memory(f"worker {rank}", error) from error
    except Exception as error:
        raise unexpected(f"worker {rank}", error) from error


def _leave(
    channel: ControlChannel, worker: _WorkerThread, words: str, patience_s: float | None, *, open_after: bool = False
) -> None:
    """End the worker and the control channel: in good order within ``patience_s``, or at once if that is None.

    At once, the others are told these words. In good order the channel is left open if ``open_after`` says so.
    """
    if patience_s is None:
        with ThreadPoolExecutor(1) as beside:  # each may wait a second for processes that do not answer
            beside.submit(worker.abort, "the run was ended")
            channel.end(words)
        worker.join(LEAVE_S)
    else:
        worker.join(patience_s)
        if not open_after:
            channel.end(None)


def _drain(reports: queue.SimpleQueue[Report], tracker: FailureTracker) -> None:
    while not reports.empty():
        tracker.add_failure(reports.get())


def _pass_on(report: Report, channel: ControlChannel) -> tuple[bool, bool]:
    """Send a report, or a failure if it cannot be sent; return (is it the last, is it no failure)."""
    try:
        kind = channel.send(report)
    except WorkerLostError:
        raise
    except Exception as error:
        kind = channel.send(unsendable(report, error))
    return kind in ("finished", "failed"), kind != "failed"


def _verdict(verdicts: queue.SimpleQueue[Report], lost: Sequence[RoundelayError]) -> int:
    """Wait until the leader has compared an audited run; return the exit code that it tells, or 1 if it is lost.

    Raises:
        DeadlineError: it takes longer than :data:`VERDICT_S`.
    """
    until_s = time.monotonic() + VERDICT_S
    while not lost and time.monotonic() < until_s:
        try:
            return int(next_item(verdicts, TICK_S).data["code"])
        except queue.Empty:
            continue
    if lost:
        return 1
    raise DeadlineError(
        "waiting for the comparison of worker 0",
        got=f"none for {VERDICT_S:g} s",
        expected="its result",
        remedy="Check the output of worker 0; compare fewer --steps.",
    )


def run_follower(task: Workload, process_group: ProcessGroup, wrap: Wrap, watch: Reporter = lambda report: None) -> int:
    """Run a worker other than 0 in this process and return its exit code; the leader reports failures.

    That is 0, or 1 after a failure; after an audited run, what the leader concludes.

    Args:
        task: the run.
        process_group: this process's membership.
        wrap: applied to the worker's endpoint.
        watch: called with every report before it is sent.

    Raises:
        WorkerLostError: the leader is gone without having reported a failure.
        DeadlineError: the leader compares an audited run for too long.
    """
    outgoing: queue.SimpleQueue[Report] = queue.SimpleQueue()
    verdicts: queue.SimpleQueue[Report] = queue.SimpleQueue()
    lost, failures = list[RoundelayError](), list[Report]()
    gone = threading.Event()
    device = _device_of(task, process_group)
    give_back_idle()

    def on_lost(rank: int, error: RoundelayError) -> None:
        lost.append(error)
        gone.set()

    def on_unreadable(error: RoundelayError) -> None:
        outgoing.put(failure(process_group.rank, error))

    channel = process_group.control_channel(task.settings.deadline_s, verdicts.put, on_lost, on_unreadable)
    worker = _WorkerThread(task, process_group, wrap, outgoing.put, device)
    ended, succeeded, code = False, True, 0

    def leave(hasty: bool = False) -> None:
        good = ended and succeeded and not lost and not hasty
        if not good:
            worker.abort("the leader is gone" if lost else _ENDED)
        worker.join(task.settings.deadline_s if good else LEAVE_S)
        if not succeeded:  # the loss of the leader may be the cause
            gone.wait(NEWS_S if process_group.launched else TOLD_S)
        channel.end(None if ended and not hasty else _ENDED)

    try:
        try:
            with frozen_gc():
                while not ended and not lost:
                    try:
                        report = next_item(outgoing, TICK_S)
                    except queue.Empty:
                        continue
                    watch(report)
                    failures += [report] if report.kind == "failed" else []
                    ended, succeeded = _pass_on(report, channel)
            if task.audit and succeeded:
                code = _verdict(verdicts, lost)
        except KeyboardInterrupt:
            if process_group.launched:
                time.sleep(NEWS_S)
            raise
        finally:
            leave()
    except KeyboardInterrupt:  # a launcher that has lost the leader ends the others: the loss is the cause to report
        leave(hasty=True)  # the interrupt may have cut the first call short
        if not lost:
            raise
    if lost:
        return process_group.without_leader(lost[0])
    if failures and not process_group.launched:
        raise process_group.attributed(process_group.rank, error_of(failures[0]))
    return code if succeeded else 1
