"""Runs workers as forked processes of this host, over gloo on loopback or through shared memory.

A forked worker starts in a fifth of a second, as everything is imported and captured already. Each has a pipe to the
launching process, where one thread, the *pump*, reads all pipes and watches the children: the closed pipe shows at once
that a worker has died, the operating system that one is stopped (SIGSTOP). So no heartbeat is needed, and no worker
waits while a report is handled.
"""

from __future__ import annotations

import fcntl
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import torch

from roundelay.deferred_signals import DeferredSignals
from roundelay.errors import InternalError, RoundelayError, RunError, WorkerLostError
from roundelay.launching.failure_tracker import FailureTracker, Listener
from roundelay.launching.threaded_workers import COALESCE_S, take_reports
from roundelay.runtime.loading.prefetch import ENDING
from roundelay.runtime.processes.child_process import fork
from roundelay.runtime.processes.worker_messages import Report, ReportAssembler, failure, write_report
from roundelay.runtime.shm_allreduce import shared_bytes
from roundelay.runtime.shm_chained_sums import sum_bytes
from roundelay.runtime.workload import Workload, Wrap, work
from roundelay.transport import FORKED
from roundelay.transport.endpoint import Endpoint

END_S = 3.0
"""Seconds that processes get to exit by themselves once the run has ended or failed."""

STOPPED_S = 3.0
"""Seconds after which a stopped worker counts as lost; Ctrl-Z stops the launching process and its clock, too."""

PIPE_BYTES, PIPES_BYTES = 1 << 20, 32 << 20
"""Capacity of a worker's pipe, and of all of a run's pipes; Linux allows 64 MiB for all pipes of a user."""

_TICK_S = 0.25

Connect = Callable[[int], Endpoint]
"""From a worker's number to its endpoint; called in the worker's own process."""


def run_forked(task: Workload, listen: Listener, wrap: Wrap) -> None:
    """Execute a task by forked processes; see :func:`roundelay.launching.launch.run`."""
    works, settings = task.works, task.settings
    shared = shared_bytes(works) | sum_bytes(works)
    with FORKED[settings.transport](len(works), settings.deadline_s, shared) as links:
        _run(task, listen, lambda worker: wrap(links.connect(worker)), links.forked)


def _run(task: Workload, listen: Listener, connect: Connect, forked: Callable[[], None]) -> None:
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    tracker = FailureTracker(len(task.works), listen)
    try:
        _train(task, connect, forked, reports, tracker)
    finally:
        while not reports.empty():
            tracker.add_failure(reports.get())
    tracker.raise_failure()


def _train(
    task: Workload,
    connect: Connect,
    forked: Callable[[], None],
    reports: queue.SimpleQueue[Report],
    tracker: FailureTracker,
) -> None:
    children: list[Child] = []
    pump = Pump(children, reports)
    with DeferredSignals() as interrupts:
        try:
            for k in range(len(task.works)):
                children.append(_fork(task, k, connect, children))
            forked()
            pump.start()
            interrupts.open()
            take_reports(reports, tracker)
        finally:
            interrupts.held = True
            succeeded = len(tracker.ended) == len(children) and not tracker.failures
            try:
                _end(children, END_S if succeeded else 0.0)
            finally:
                pump.stop()


@final
class Child:
    """A forked worker: its pid and the reading end of its pipe."""

    def __init__(self, worker: int, pid: int, pipe: int) -> None:
        self.worker, self.pid, self.pipe = worker, pid, pipe
        self.stopped = False
        self.killed = False  # by the launching process when the run is over, which is no failure
        self._status: int | None = None
        self._lock = threading.Lock()  # two threads may call, and the system returns a wait status only once

    def status(self) -> int | None:
        """Return its wait status; None while it runs."""
        with self._lock:
            while self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if not pid:
                    break
                self.stopped = os.WIFSTOPPED(status)
                if not self.stopped and not os.WIFCONTINUED(status):
                    self._status = status
        return self._status

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds for its end; return whether it has ended."""
        deadline = time.monotonic() + seconds
        while self.status() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True


@final
class Pump:
    """Reads the children's pipes and watches the children, in a separate thread."""

    def __init__(self, children: Sequence[Child], reports: queue.SimpleQueue[Report]) -> None:
        self._children, self._reports = children, reports
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="pump", daemon=True)

    def start(self) -> None:
        """Start the thread, after all forks: a child must not inherit a lock that another thread holds."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close the pipes, after every child has ended."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for child in self._children:
            os.close(child.pipe)

    def _main(self) -> None:
        try:
            self._listen()
        except Exception as error:  # otherwise the main thread would wait for ever
            self._reports.put(failure(self._children[0].worker, _unreadable(error)))

    def _listen(self) -> None:
        open_pipes = {child.pipe: (child, ReportAssembler()) for child in self._children}
        poller = select.poll()  # select is limited to 1024 file descriptors
        for pipe in open_pipes:
            poller.register(pipe, select.POLLIN)
        ended: set[int] = set()
        stopped_s = dict.fromkeys(open_pipes, 0.0)
        last = time.monotonic()
        while open_pipes and not self._stopping.is_set():
            for pipe, _ in poller.poll(1000 * _TICK_S):
                child, incoming = open_pipes[pipe]
                reports = incoming.read(pipe)
                for report in reports or ():
                    if report.kind in ("finished", "failed"):
                        ended.add(child.worker)
                    self._reports.put(report)
                if reports is None:
                    poller.unregister(pipe)
                    del open_pipes[pipe]
                    if child.worker not in ended and not child.killed:
                        self._reports.put(_death_of(child))
            now = time.monotonic()
            self._watch(stopped_s, min(now - last, 2 * _TICK_S))
            last = now

    def _watch(self, stopped_s: dict[int, float], passed_s: float) -> None:
        """Report children that have been stopped too long, counting only time in which this process was running."""
        for child in self._children:
            child.status()
            before = stopped_s[child.pipe]
            stopped_s[child.pipe] = before + passed_s if child.stopped else 0.0
            if before < STOPPED_S <= stopped_s[child.pipe]:
                how = f"it was stopped by a signal and not continued for {STOPPED_S:g} s"
                self._reports.put(_lost(child, how, "Check what stops processes here: a debugger, or Ctrl-Z."))


def _pipe(num_workers: int) -> tuple[int, int]:
    """Open a pipe with a large buffer, if the system allows: each time that it is full, two processes must wait."""
    reading, writing = os.pipe()
    with suppress(AttributeError, OSError):  # not Linux, or the user's limit is reached
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, min(PIPE_BYTES, PIPES_BYTES // num_workers))
    return reading, writing


def _fork(task: Workload, worker: int, connect: Connect, children: Sequence[Child]) -> Child:
    reading, writing = _pipe(len(task.works))

    def main() -> None:
        for descriptor in (reading, *(child.pipe for child in children)):
            os.close(descriptor)
        _main(task, worker, connect, writing)

    try:
        # a scheduler sends these signals to all processes; the launching process handles them
        return Child(worker, fork(main, ENDING), reading)
    except RunError:
        os.close(reading)
        raise
    finally:
        os.close(writing)


def _main(task: Workload, worker: int, connect: Connect, writing: int) -> None:
    sender = _Sender(writing)
    try:
        if task.prepare is not None:
            task.prepare(worker)
        work(task, worker, connect(worker), sender.put)
    except Exception as error:  # while connecting; afterwards `work` reports errors itself
        sender.put(failure(worker, error if isinstance(error, RoundelayError) else _setup_error(worker, error)))
    finally:
        sender.finish()


@final
class _Sender:
    """Writes reports into a pipe, in a separate thread, so that the worker does not wait for the pipe."""

    def __init__(self, writing: int) -> None:
        self._writing = writing
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self.put = self._reports.put
        self._thread = threading.Thread(target=self._main, name="sender", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when everything is written; if the launching process is gone, this process is killed before."""
        self._reports.put(None)
        self._thread.join()

    def _main(self) -> None:
        torch.set_num_threads(1)
        with suppress(BrokenPipeError):  # the launching process is gone, and this one is about to be killed
            while (report := self._reports.get()) is not None:
                write_report(self._writing, report)
                if self._reports.empty():
                    time.sleep(COALESCE_S)  # a wake-up per report costs the worker more than the report


def _unreadable(error: Exception) -> InternalError:
    return InternalError(
        "the launcher",
        got=f"{type(error).__name__}: {error}",
        expected="reports of its workers that it can read",
        remedy="If memory ran out: it holds the newest state of all stages. Otherwise report this as a bug.",
    )


def _setup_error(worker: int, error: Exception) -> RunError:
    return RunError(
        f"worker {worker}, connecting to the others",
        got=f"{type(error).__name__}: {error}",
        expected="connections to the others, and threads that serve them",
        remedy="`roundelay doctor` shows the limits of this machine; ROUNDELAY_DEBUG=1 shows the traceback.",
    )


def _death_of(child: Child) -> Report:
    child.wait(END_S)
    status = child.status()
    if status is not None and os.WIFSIGNALED(status):
        return _lost(child, f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}")
    return _lost(child, "it ended without a report")


def _lost(
    child: Child,
    how: str,
    remedy: str = "If the system killed it for memory, use smaller micro-batches or more workers.",
) -> Report:
    error = WorkerLostError(
        f"worker {child.worker} (process {child.pid})",
        got=how,
        expected="a worker that runs until the run ends",
        remedy=remedy,
    )
    return failure(child.worker, error)


def _end(children: Sequence[Child], grace_s: float) -> None:
    """Wait up to ``grace_s``, then kill the children that still run, and reap them."""
    deadline = time.monotonic() + grace_s
    try:
        for child in children:
            child.wait(deadline - time.monotonic())
    finally:
        for child in children:
            if child.status() is None:
                child.killed = True
                os.kill(child.pid, signal.SIGKILL)
        for child in children:
            child.wait(END_S)
