"""The processes that a launcher such as torchrun has started together, one worker each, on one host or several.

They meet at the launcher's store. Worker 0's process leads: it hears the reports of all, and alone shows and writes
things. Beside the workers' own endpoints there is a second set, the *control* line: reports go to the leader on it, and
a beat every second both ways, for nobody here is the parent of anybody and would be told that a process is stopped.
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
from typing import Any, final

import torch
import torch.distributed as dist

from roundelay.debug import LEADER, Launched
from roundelay.errors import DeadlineError, WorkerLostError
from roundelay.ir.plan import Plan
from roundelay.runtime.device import Device, device_of
from roundelay.runtime.garbage import settled
from roundelay.runtime.mortal import die_with, end, whereabouts
from roundelay.runtime.report import Report, from_bytes, to_bytes
from roundelay.runtime.tally import Listener, Tally, failure
from roundelay.runtime.threads import follow
from roundelay.runtime.worker import Task, Wrap, work
from roundelay.schedules import num_workers, workers_of
from roundelay.transport.contract import Arrived, Endpoint, Granted, Message
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.lanes import NcclLane, open_lanes
from roundelay.transport.nccl import NcclEndpoint
from roundelay.transport.queues import next_item

MEET_S = 30.0
"""Seconds in which the launcher's store must answer."""

PLAN_S = 900.0
"""Seconds that the leader may take to capture and plan."""

BEAT_S, SILENT_S = 1.0, 5.0
"""Seconds between two beats, and seconds of silence after which a process counts as lost."""

LEAVE_S = 3.0
"""Seconds that a worker which has failed, or was given up, gets to leave its connections. It tells its end before."""

NEWS_S = 0.5
"""Seconds in which the end of a process is heard of here."""

_TURN_S = 0.1
_REPORT, _BEAT = 0, 1
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
            store = dist.TCPStore(  # type: ignore[attr-defined]
                place.host, place.port, is_master=False, timeout=timedelta(seconds=MEET_S)
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
            self._store.wait([name], timedelta(seconds=PLAN_S))
            return bytes(self._store.get(name)).decode()
        except RuntimeError as error:
            raise WorkerLostError(
                f"worker {self.rank} waiting for the leader's {name}",
                got=str(error).splitlines()[0],
                expected=f"it within {PLAN_S:g} s",
                remedy="See what worker 0 told.",
            ) from error

    def tell_where(self) -> None:
        """Publish which process this is, for :meth:`end`."""
        self.give(f"where {self.restart} {self.rank}", whereabouts(os.getpid()))

    def end(self, rank: int) -> bool:
        """Kill a member that answers no more, if it is on this host: its launcher would wait for it for long."""
        name = f"where {self.restart} {rank}"
        try:
            return self._store.check([name]) and end(self.take(name))
        except (RuntimeError, WorkerLostError):  # the launcher's store has gone as well
            return False

    def gather(self, what: str) -> None:
        """Wait until every member has come so far.

        Raises:
            WorkerLostError: one never does.
        """
        self.give(f"{what} {self.restart} {self.rank}", "")
        for rank in range(self.size):
            self.take(f"{what} {self.restart} {rank}")

    def endpoint(self, line: str, deadline_s: float) -> Endpoint:
        """This process's end of one set of connections."""
        return GlooEndpoint(self.rank, self.size, self._meeting(line), deadline_s, self._interface)

    def data(self, plan: Plan, device: Device) -> Endpoint:
        """This process's end of the workers' own connections, on the plan's transport.

        Raises:
            DeadlineError: another process did not open its side in time.
        """
        frames = self.endpoint("data", plan.deadline_s)
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


def lead(task: Task, listen: Listener, wrap: Wrap, party: Party) -> None:
    """Run worker 0 in this process, and hear all; see :func:`roundelay.runtime.launch.run`."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    tally = Tally(party.size, listen)
    device = device_of(task.plan.devices[party.rank])
    control, data = _connected(task, wrap, party, device)
    line = _Line(control, party, reports.put, lambda worker, lost: reports.put(failure(worker, lost)))
    worker = _start(task, data, party.rank, reports.put, device)
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
            _leave(task, tally, line, data, worker)
    except KeyboardInterrupt:  # a launcher that has lost one process ends the others: the loss is the cause to tell
        _leave(task, tally, line, data, worker)  # which it may have cut short
        if not causes:
            raise
        tally.failures[:] = causes
    _drain(reports, tally)
    tally.raise_failure()


def _leave(task: Task, tally: Tally, line: _Line, data: Endpoint, worker: threading.Thread) -> None:
    """End this process's part, its worker too: threads that gloo wakes while the interpreter shuts down abort it."""
    if tally.failures or len(tally.ended) < num_workers(task.plan):
        data.abort("the run was ended")
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
    lost: list[WorkerLostError] = []
    device = device_of(task.plan.devices[party.rank])
    control, data = _connected(task, wrap, party, device)
    line = _Line(control, party, lambda report: None, lambda worker, error: lost.append(error))
    worker = _start(task, data, party.rank, outgoing.put, device)
    ended, well = False, True

    def leave() -> None:
        if lost or not ended:
            data.abort("the leader is gone" if lost else _ENDED)
        worker.join(task.plan.deadline_s if ended and well and not lost else LEAVE_S)
        line.end(None if ended else _ENDED)

    try:
        try:
            with settled():
                while not ended and not lost:
                    try:
                        report = next_item(outgoing, 0.2)
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


def _connected(task: Task, wrap: Wrap, party: Party, device: Device) -> tuple[Endpoint, Endpoint]:
    return party.endpoint("control", task.plan.deadline_s), wrap(party.data(task.plan, device))


def _start(
    task: Task, endpoint: Endpoint, rank: int, report: Callable[[Report], None], device: Device
) -> threading.Thread:
    def main() -> None:
        torch.set_num_threads(1)
        work(task, rank, endpoint, report, device)

    thread = threading.Thread(target=main, name=f"worker {rank}", daemon=True)
    thread.start()
    return thread


@final
class _Line:
    """This process's end of the control line: hears reports and beats, sends beats, notices who is silent.

    A process watches those that it depends on: the leader all, the others the leader.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        party: Party,
        on_report: Callable[[Report], None],
        on_lost: Callable[[int, WorkerLostError], None],
    ) -> None:
        self._endpoint, self._on_report, self._on_lost = endpoint, on_report, on_lost
        self._party = party
        party.tell_where()
        self._others = party.others if party.leads else (LEADER,)
        self._silent_s = dict.fromkeys(self._others, 0.0)
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name="control", daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        """Send a report to the leader."""
        blob = torch.frombuffer(bytearray(to_bytes(report)), dtype=torch.uint8)
        with self._lock:
            self._endpoint.send(LEADER, Message(_REPORT, (), (blob,)))

    def end(self, reason: str | None) -> None:
        """Leave in good order, or with a reason."""
        self._ending.set()
        self._thread.join()
        if reason is None:
            self._endpoint.close()
        else:
            self._endpoint.abort(reason)

    def _main(self) -> None:
        try:
            self._watch()
        except Exception as error:  # else nobody would hear, or be heard, any more
            self._on_lost(self._party.rank, _deaf(self._party.rank, error))

    def _watch(self) -> None:
        beat, last = 0.0, time.monotonic()
        while not self._ending.is_set():
            now = time.monotonic()
            if now - beat >= BEAT_S:
                beat = now
                with self._lock:
                    for other in self._others:
                        self._endpoint.grant(other, _BEAT)
            for other in self._silent_s:  # time in which this process could hear: it may have been stopped itself
                self._silent_s[other] += min(now - last, 2 * _TURN_S)
            last = now
            wait_s = _TURN_S
            while self._hear(wait_s) and time.monotonic() - now < BEAT_S:  # or others would miss this one's beats
                wait_s = 0.0
            for other in [k for k, silent_s in self._silent_s.items() if silent_s > SILENT_S]:
                ended = ", and was ended" if self._party.end(other) else ""
                self._lose(other, f"silence for {SILENT_S:g} s{ended}")

    def _hear(self, wait_s: float) -> bool:
        """Take the next delivery; whether one came."""
        try:
            delivery = self._endpoint.receive(wait_s)
        except DeadlineError:
            return False
        if delivery.source in self._silent_s:
            self._silent_s[delivery.source] = 0.0
        if isinstance(delivery, Arrived):
            value = delivery.message.values[0]
            assert isinstance(value, torch.Tensor)
            report = from_bytes(value.numpy().tobytes())
            if report.kind in ("finished", "failed"):
                self._silent_s.pop(delivery.source, None)  # it may leave now
            self._on_report(report)
        elif not isinstance(delivery, Granted):
            self._lose(delivery.source, delivery.reason)
        return True

    def _lose(self, other: int, how: str) -> None:
        if self._silent_s.pop(other, None) is not None:
            self._on_lost(other, _lost(other, how))


def _deaf(worker: int, error: Exception) -> WorkerLostError:
    return WorkerLostError(
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
