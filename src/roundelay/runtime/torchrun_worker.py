"""What a member of a party does in a run: the leader leads, the others attend, and each has a worker.

The main thread hears the signals by which a launcher ends this process, so the worker has a thread of its own.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from functools import partial
from typing import final

import torch

from roundelay.errors import RoundelayError, WorkerLostError
from roundelay.runtime.control_channel import NEWS_S, ControlChannel
from roundelay.runtime.device import Device, device_of
from roundelay.runtime.failure_tracker import FailureTracker, Listener, failure, instead
from roundelay.runtime.gc_policy import settled
from roundelay.runtime.rendezvous import TICK_S, ProcessGroup
from roundelay.runtime.threaded_workers import follow
from roundelay.runtime.user_errors import out_of_memory, unexpected
from roundelay.runtime.worker import Task, Wrap, work
from roundelay.runtime.worker_messages import Report, Reporter
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.queues import next_item

LEAVE_S = 2.0
"""Seconds that a worker which has failed, or was given up, gets to leave its connections. It tells its end before."""

_LEADER_TELLS = "the run has failed; worker 0 tells why"
_ENDED = "it was ended"


@final
class _Working:
    """This process's worker, in a thread of its own, which first connects it with the others.

    Args:
        task: the run.
        party: whose member this is.
        wrap: put around the worker's endpoint.
        report: where the worker tells its end, too.
        device: where it computes.
    """

    def __init__(self, task: Task, party: ProcessGroup, wrap: Wrap, report: Reporter, device: Device) -> None:
        self._task, self._party, self._wrap, self._report, self._device = task, party, wrap, report, device
        self._lock = threading.Lock()
        self._until_s = math.inf
        self._endpoint: Endpoint | None = None
        self._ended = ""  # why, if it has been
        self._thread = threading.Thread(target=self._main, name=f"worker {party.rank}", daemon=True)
        self._thread.start()

    def abort(self, reason: str) -> None:
        """End its connections, now or when they are there."""
        with self._lock:
            self._ended = self._ended or reason
            endpoint = self._endpoint
        if endpoint is not None:
            endpoint.abort(reason)

    def join(self, seconds: float) -> None:
        """Wait until it has left: threads that gloo wakes while the interpreter shuts down abort it.

        Who waits again, because the first wait was interrupted, waits no longer than that would have.
        """
        now = time.monotonic()
        self._until_s = min(self._until_s, now + seconds)
        self._thread.join(max(0.0, self._until_s - now))

    def _main(self) -> None:
        torch.set_num_threads(1)
        rank = self._party.rank
        try:
            endpoint = self._wrap(self._party.data(self._task.plan, self._device))
        except RoundelayError as error:
            self._report(failure(rank, error))
            return
        except Exception as error:  # nothing may end a worker in silence
            self._report(failure(rank, unexpected(f"worker {rank}", error)))
            return
        with self._lock:
            self._endpoint, ended = endpoint, self._ended
        if ended:
            endpoint.abort(ended)
        work(self._task, rank, endpoint, self._report, self._device)


def run_leader(task: Task, listen: Listener, wrap: Wrap, party: ProcessGroup) -> None:
    """Run worker 0 in this process, and hear all; see :func:`roundelay.runtime.launch.run`."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    tally = FailureTracker(party.size, listen)
    device = device_of(task.plan.devices[party.rank])  # first: if there is none, nobody is to be told of a loss

    def failed(rank: int, error: RoundelayError) -> None:
        reports.put(failure(rank, error))

    line = party.line(task.plan.deadline_s, reports.put, failed, partial(failed, party.rank))
    worker = _Working(task, party, wrap, reports.put, device)
    causes: list[Report] = []
    try:
        try:
            _follow(reports, tally, party.rank)
        except KeyboardInterrupt:
            time.sleep(NEWS_S)
            _drain(reports, tally)
            raise
        finally:
            causes = [f for f in tally.failures if f.data["got"] != _ENDED]
            well = not tally.failures and len(tally.ended) == task.plan.num_workers
            _leave(line, worker, task.plan.deadline_s if well else None)
    except KeyboardInterrupt:  # a launcher that has lost one process ends the others: the loss is the cause to tell
        _leave(line, worker, None)  # which it may have cut short
        if not causes:
            raise
        tally.failures[:] = causes
    _drain(reports, tally)
    tally.raise_failure()


def _follow(reports: queue.SimpleQueue[Report], tally: FailureTracker, rank: int) -> None:
    """Hear the reports to the end of the run; whatever goes wrong on the way is an error with a cause to tell."""
    try:
        follow(reports, tally)
    except RoundelayError:
        raise
    except MemoryError as error:
        raise out_of_memory(f"worker {rank}", error) from error
    except Exception as error:
        raise unexpected(f"worker {rank}", error) from error


def _leave(line: ControlChannel, worker: _Working, patience_s: float | None) -> None:
    """End this process's part, its worker too: in good order, which may take so long, or at once."""
    if patience_s is None:
        worker.abort("the run was ended")
        line.end(_LEADER_TELLS)
        worker.join(LEAVE_S)
    else:
        worker.join(patience_s)
        line.end(None)


def _drain(reports: queue.SimpleQueue[Report], tally: FailureTracker) -> None:
    while not reports.empty():
        tally.late(reports.get())


def _pass_on(report: Report, line: ControlChannel) -> tuple[bool, bool]:
    """Send a report, or why it cannot be sent; whether it is the worker's last, and whether all is well."""
    try:
        line.send(report)
    except WorkerLostError:
        raise
    except Exception as error:
        report = instead(report, error)
        line.send(report)
    return report.kind in ("finished", "failed"), report.kind != "failed"


def run_follower(task: Task, party: ProcessGroup, wrap: Wrap) -> bool:
    """Run one other worker in this process; whether all went well. What went wrong, the leader tells.

    Raises:
        WorkerLostError: the leader is gone, and has told nothing.
    """
    outgoing: queue.SimpleQueue[Report] = queue.SimpleQueue()
    lost: list[RoundelayError] = []
    gone = threading.Event()
    device = device_of(task.plan.devices[party.rank])

    def on_lost(rank: int, error: RoundelayError) -> None:
        lost.append(error)
        gone.set()

    def on_deaf(error: RoundelayError) -> None:
        outgoing.put(failure(party.rank, error))

    line = party.line(task.plan.deadline_s, lambda report: None, on_lost, on_deaf)
    worker = _Working(task, party, wrap, outgoing.put, device)
    ended, well = False, True

    def leave(hasty: bool = False) -> None:
        good = ended and well and not lost and not hasty
        if not good:
            worker.abort("the leader is gone" if lost else _ENDED)
        worker.join(task.plan.deadline_s if good else LEAVE_S)
        if not well:  # perhaps since the leader is gone
            gone.wait(NEWS_S)
        line.end(None if ended and not hasty else _ENDED)

    try:
        try:
            with settled():
                while not ended and not lost:
                    try:
                        report = next_item(outgoing, TICK_S)
                    except queue.Empty:
                        continue
                    ended, well = _pass_on(report, line)
        except KeyboardInterrupt:
            time.sleep(NEWS_S)
            raise
        finally:
            leave()
    except KeyboardInterrupt:  # a launcher that has lost the leader ends the others: the loss is the cause to tell
        leave(hasty=True)  # which it may have cut short
        if not lost:
            raise
    if lost and lost[0].got != _LEADER_TELLS:
        raise lost[0]
    return well and not lost
