"""The processes that a launcher such as torchrun has started together, one worker each, on one host or several.

They meet at the launcher's store. Worker 0's process leads: it hears the reports of all on the control line
(:mod:`roundelay.runtime.line`), and alone shows and writes things. Whatever waits inside torch does so in a thread of
its own: the main thread must hear the signals by which a launcher ends this process.
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from roundelay.debug import LEADER, Launched
from roundelay.errors import RoundelayError, WorkerLostError
from roundelay.ir.plan import Plan
from roundelay.runtime.device import Device, device_of
from roundelay.runtime.explain import unexpected
from roundelay.runtime.garbage import settled
from roundelay.runtime.line import Line, OnDeaf, OnLost
from roundelay.runtime.mortal import die_with, end, whereabouts
from roundelay.runtime.report import Report, Reporter
from roundelay.runtime.tally import Listener, Tally, failure
from roundelay.runtime.threads import follow
from roundelay.runtime.worker import Task, Wrap, work
from roundelay.schedules import num_workers, workers_of
from roundelay.transport.contract import Endpoint
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.lanes import NcclLane, open_lanes
from roundelay.transport.nccl import NcclEndpoint
from roundelay.transport.queues import next_item

MEET_S = 30.0
"""Seconds in which the launcher's store must answer."""

PLAN_S = 900.0
"""Seconds that the leader may take to capture and plan."""

LEAVE_S = 3.0
"""Seconds that a worker which has failed, or was given up, gets to leave its connections. It tells its end before."""

NEWS_S = 1.0
"""Seconds in which the end of a process is heard of here; the connections of its worker may tell it before the line."""

_T = TypeVar("_T")
_TICK_S = 0.2
_LEADER_TELLS = "the run has failed; worker 0 tells why"
_ENDED = "it was ended"


@final
class Party:
    """This process's membership: its number, the others', and whether it is the one that a person looks at.

    The leader tells what ends a run. Of a leader that is lost one member on each host tells, its deputy.

    Args:
        place: how the launcher started it.

    Raises:
        WorkerLostError: the launcher's store cannot be reached.
    """

    def __init__(self, place: Launched) -> None:
        self.rank, self.size, self.restart = place.rank, place.size, place.restart
        self.others = (*range(place.rank), *range(place.rank + 1, place.size))
        self.leads, self.deputy = place.rank == LEADER, place.deputy
        self._interface = place.interface if place.nodes > 1 else None
        try:
            store = _patiently(
                lambda: dist.TCPStore(  # type: ignore[attr-defined]
                    place.host, place.port, is_master=False, timeout=timedelta(seconds=MEET_S)
                )
            )
        except (RuntimeError, ValueError) as error:
            raise WorkerLostError(
                f"the launcher's store at {place.host}:{place.port}",
                got=str(error).splitlines()[0],
                expected=f"an answer within {MEET_S:g} s",
                remedy="See whether the launcher still runs and its rendezvous endpoint can be reached from this host.",
            ) from error
        self._store = dist.PrefixStore(f"roundelay/{place.run}", store)  # type: ignore[attr-defined]
        die_with(os.getppid(), ctypes.CDLL(None))  # a launcher that is killed tells nobody

    def give(self, name: str, text: str) -> None:
        """Publish a text; the leader does so."""
        self._store.set(name, text)

    def take(self, name: str) -> str:
        """The text that the leader publishes under this name.

        Raises:
            WorkerLostError: it never does.
        """
        try:
            _patiently(lambda: self._store.wait([name], timedelta(seconds=PLAN_S)))
            return bytes(self._store.get(name)).decode()
        except RuntimeError as error:
            raise WorkerLostError(
                f"worker {self.rank} waiting for the leader's {name}",
                got=str(error).splitlines()[0],
                expected=f"it within {PLAN_S:g} s",
                remedy="See what worker 0 told.",
            ) from error

    def gather(self, what: str) -> None:
        """Wait until every member has come so far.

        Raises:
            WorkerLostError: one never does.
        """
        self.give(f"{what} {self.restart} {self.rank}", "")
        for rank in range(self.size):
            self.take(f"{what} {self.restart} {rank}")

    def line(self, deadline_s: float, on_report: Reporter, on_lost: OnLost, on_deaf: OnDeaf) -> Line:
        """This process's end of the control line, when all have met on it.

        Args:
            deadline_s: seconds in which they must.
            on_report: told of every report.
            on_lost: told of every process that is lost, of those that this one depends on.
            on_deaf: told if this process can hear no more.

        Raises:
            DeadlineError: not all have come.
        """
        watched = self.others if self.leads else (LEADER,)
        self.give(self._where(self.rank), whereabouts(os.getpid()))  # all have, when all have met
        reports = _patiently(lambda: self._endpoint("reports", deadline_s))
        beats = _patiently(lambda: self._endpoint("beats", deadline_s))
        where = {rank: self.take(self._where(rank)) for rank in watched}  # a store that is gone may not answer later

        def kill(rank: int) -> bool:
            """If it is on this host: its launcher would wait for it for long."""
            return end(where[rank])

        return Line(reports, beats, watched, kill, on_report, on_lost, on_deaf)

    def _where(self, rank: int) -> str:
        return f"where {self.restart} {rank}"

    def _endpoint(self, name: str, deadline_s: float) -> Endpoint:
        """This process's end of one set of connections."""
        return GlooEndpoint(self.rank, self.size, self._meeting(name), deadline_s, self._interface)

    def data(self, plan: Plan, device: Device) -> Endpoint:
        """This process's end of the workers' own connections, on the plan's transport.

        Raises:
            DeadlineError: another process did not open its side in time.
        """
        frames = self._endpoint("data", plan.deadline_s)
        if plan.transport != "nccl":
            return frames
        others = _partners(plan, self.rank)

        def make(name: str, sends: bool) -> NcclLane:
            return NcclLane(self._meeting(f"lane/{name}"), sends)

        place = device.lane_end()
        return NcclEndpoint(frames, open_lanes(self.rank, others, make, place, plan.deadline_s), place, plan.deadline_s)

    def _meeting(self, name: str) -> Any:
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def where(self) -> str:
        """This process, for people."""
        return f"worker {self.rank} (process {os.getpid()} on {socket.gethostname()})"


def _partners(plan: Plan, worker: int) -> list[int]:
    """With whom a worker exchanges tensors."""
    home = workers_of(plan)
    pairs = [{home[edge.source], home[edge.target]} for edge in plan.edges]
    return sorted({other for pair in pairs if worker in pair for other in pair - {worker}})


def _patiently(wait: Callable[[], _T]) -> _T:
    """The result of what waits inside torch, where no signal is heard."""
    results: queue.SimpleQueue[tuple[_T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def main() -> None:
        try:
            results.put((wait(), None))
        except Exception as error:  # raised again where it is waited for
            results.put((None, error))

    threading.Thread(target=main, name="waits", daemon=True).start()
    while True:
        try:
            result, error = next_item(results, _TICK_S)
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # there is one or the other


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

    def __init__(self, task: Task, party: Party, wrap: Wrap, report: Reporter, device: Device) -> None:
        self._task, self._party, self._wrap, self._report, self._device = task, party, wrap, report, device
        self._lock = threading.Lock()
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
        """Wait until it has left: threads that gloo wakes while the interpreter shuts down abort it."""
        self._thread.join(seconds)

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


def lead(task: Task, listen: Listener, wrap: Wrap, party: Party) -> None:
    """Run worker 0 in this process, and hear all; see :func:`roundelay.runtime.launch.run`."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    tally = Tally(party.size, listen)
    device = device_of(task.plan.devices[party.rank])  # first: if there is none, nobody is to be told of a loss

    def failed(rank: int, error: RoundelayError) -> None:
        reports.put(failure(rank, error))

    line = party.line(task.plan.deadline_s, reports.put, failed, partial(failed, party.rank))
    worker = _Working(task, party, wrap, reports.put, device)
    causes: list[Report] = []
    try:
        try:
            follow(reports, tally)
        except KeyboardInterrupt:
            time.sleep(NEWS_S)
            _drain(reports, tally)
            raise
        finally:
            causes = [f for f in tally.failures if f.data["got"] != _ENDED]
            _leave(task, tally, line, worker)
    except KeyboardInterrupt:  # a launcher that has lost one process ends the others: the loss is the cause to tell
        _leave(task, tally, line, worker)  # which it may have cut short
        if not causes:
            raise
        tally.failures[:] = causes
    _drain(reports, tally)
    tally.raise_failure()


def _leave(task: Task, tally: Tally, line: Line, worker: _Working) -> None:
    """End this process's part, its worker too."""
    if tally.failures or len(tally.ended) < num_workers(task.plan):
        worker.abort("the run was ended")
        line.end(_LEADER_TELLS)
        worker.join(LEAVE_S)
    else:
        worker.join(task.plan.deadline_s)
        line.end(None)


def _drain(reports: queue.SimpleQueue[Report], tally: Tally) -> None:
    while not reports.empty():
        tally.late(reports.get())


def attend(task: Task, party: Party, wrap: Wrap) -> bool:
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

    def leave() -> None:
        good = ended and well and not lost
        if not good:
            worker.abort("the leader is gone" if lost else _ENDED)
        worker.join(task.plan.deadline_s if good else LEAVE_S)
        if not well:  # perhaps since the leader is gone
            gone.wait(NEWS_S)
        line.end(None if ended else _ENDED)

    try:
        try:
            with settled():
                while not ended and not lost:
                    try:
                        report = next_item(outgoing, _TICK_S)
                    except queue.Empty:
                        continue
                    line.send(report)
                    ended, well = report.kind in ("finished", "failed"), report.kind != "failed"
        except KeyboardInterrupt:
            time.sleep(NEWS_S)
            raise
        finally:
            leave()
    except KeyboardInterrupt:  # a launcher that has lost the leader ends the others: the loss is the cause to tell
        leave()  # which it may have cut short
        if not lost:
            raise
    if lost and lost[0].got != _LEADER_TELLS:
        raise lost[0]
    return well and not lost
