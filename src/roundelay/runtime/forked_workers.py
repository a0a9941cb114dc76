"""Workers as forked processes of this host, over gloo on loopback or through shared memory.

A forked worker starts in a fifth of a second, as everything is imported and captured already. Each has a pipe to the
launcher; a *pump*, one thread of the launcher, reads them all and watches over the children: a worker that dies is
told at once by its closed pipe, one that is stopped (SIGSTOP) by the operating system. So nothing needs a heartbeat,
and no worker waits for what the launcher does with a report, except that a second state waits until the first is used.
"""

from __future__ import annotations

import fcntl
import os
import queue
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

import torch

from roundelay.deferred_signals import Interrupts
from roundelay.errors import InternalError, RoundelayError, RunError, WorkerLostError
from roundelay.runtime.child_process import fork
from roundelay.runtime.failure_tracker import FailureTracker, Listener, failure, instead
from roundelay.runtime.prefetch import ENDING
from roundelay.runtime.threaded_workers import HANDFUL_S, follow
from roundelay.runtime.worker import Task, Wrap, work
from roundelay.runtime.worker_messages import Report, ReportAssembler, pieces_of
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.shm import ShmEndpoint
from roundelay.transport.shm_resources import open_pairs

END_S = 3.0
"""Seconds that processes get to end by themselves once the run has ended or failed."""

STOPPED_S = 3.0
"""Seconds after which a stopped worker counts as lost; a person who presses Ctrl-Z stops the launcher's clock too."""

PIPE_BYTES, PIPES_BYTES = 1 << 20, 32 << 20
"""That a worker's pipe may hold, and all of a run's together: a system lets a person's pipes hold 64 MiB."""

_TICK_S = 0.25

Connect = Callable[[int], Endpoint]
"""From a worker's number to its endpoint; called in the worker's own process."""


def run_processes(task: Task, listen: Listener, wrap: Wrap) -> None:
    """Execute a task by processes; see :func:`roundelay.runtime.launch.run`."""
    with _meeting_place() as store:

        def connect(worker: int) -> Endpoint:
            return wrap(GlooEndpoint(worker, task.plan.num_workers, store, task.plan.deadline_s))

        _run(task, listen, connect)


@contextmanager
def _meeting_place() -> Generator[str, None, None]:
    """Path of an empty file for the workers to meet at; in memory, if possible: then nothing can be left over."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        descriptor = os.memfd_create("roundelay")
        try:
            yield f"/proc/self/fd/{descriptor}"  # the forked workers have it too
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="roundelay-", ignore_cleanup_errors=True) as folder:
            yield str(Path(folder) / "store")


def run_sharing(task: Task, listen: Listener, wrap: Wrap) -> None:
    """Execute a task by processes that share memory; see :func:`roundelay.runtime.launch.run`."""
    wiring = open_pairs(task.plan.num_workers)

    def connect(worker: int) -> Endpoint:
        return wrap(ShmEndpoint(worker, wiring, task.plan.deadline_s))

    try:
        _run(task, listen, connect, wiring.close)
    finally:
        wiring.close()


def _run(task: Task, listen: Listener, connect: Connect, forked: Callable[[], None] = lambda: None) -> None:
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    tally = FailureTracker(task.plan.num_workers, listen)
    try:
        _train(task, connect, forked, reports, tally)
    finally:
        while not reports.empty():
            tally.late(reports.get())
    tally.raise_failure()


def _train(
    task: Task, connect: Connect, forked: Callable[[], None], reports: queue.SimpleQueue[Report], tally: FailureTracker
) -> None:
    children: list[Child] = []
    pump = Pump(children, reports)
    with Interrupts() as interrupts:
        try:
            for k in range(task.plan.num_workers):
                children.append(_fork(task, k, connect, children))
            forked()
            pump.start()
            interrupts.open()
            follow(reports, tally)
        finally:
            interrupts.held = True
            well = len(tally.ended) == len(children) and not tally.failures  # else a stopped one is waited for again
            try:
                _end(children, END_S if well else 0.0)
            finally:
                pump.stop()


@final
class Child:
    """A forked worker: its process number and the reading end of its pipe."""

    def __init__(self, worker: int, pid: int, pipe: int) -> None:
        self.worker, self.pid, self.pipe = worker, pid, pipe
        self.stopped = False
        self.killed = False  # by the launcher, when the run is over: that is nobody's cause
        self._status: int | None = None
        self._lock = threading.Lock()  # two threads may ask, and a wait status can be had only once

    def status(self) -> int | None:
        """Its wait status, if it has ended."""
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
        """Whether it ends within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.status() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True


@final
class Pump:
    """Reads the children's pipes and watches over the children, in a thread of its own."""

    def __init__(self, children: Sequence[Child], reports: queue.SimpleQueue[Report]) -> None:
        self._children, self._reports = children, reports
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="pump", daemon=True)

    def start(self) -> None:
        """Begin; all children have been forked, for nothing may be forked beside a thread that holds locks."""
        self._thread.start()

    def stop(self) -> None:
        """End; every child has ended."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for child in self._children:
            os.close(child.pipe)

    def _main(self) -> None:
        try:
            self._listen()
        except Exception as error:  # else the launcher would wait for what nobody reads
            self._reports.put(failure(self._children[0].worker, _unread(error)))

    def _listen(self) -> None:
        open_pipes = {child.pipe: (child, ReportAssembler()) for child in self._children}
        poller = select.poll()  # select knows the first 1024 files only
        for pipe in open_pipes:
            poller.register(pipe, select.POLLIN)
        ended: set[int] = set()
        stopped_s = dict.fromkeys(open_pipes, 0.0)
        last = time.monotonic()
        while open_pipes and not self._stopping.is_set():
            for pipe, _ in poller.poll(1000 * _TICK_S):
                child, incoming = open_pipes[pipe]
                size = os.readv(pipe, incoming.rooms())
                for report in incoming.filled(size):
                    if report.kind in ("finished", "failed"):
                        ended.add(child.worker)
                    self._reports.put(report)
                if not size:
                    poller.unregister(pipe)
                    del open_pipes[pipe]
                    if child.worker not in ended and not child.killed:
                        self._reports.put(_died(child))
            now = time.monotonic()
            self._watch(stopped_s, min(now - last, 2 * _TICK_S))
            last = now

    def _watch(self, stopped_s: dict[int, float], passed_s: float) -> None:
        """Tell of children that have been stopped for too long, in time that this process has lived through."""
        for child in self._children:
            child.status()
            before = stopped_s[child.pipe]
            stopped_s[child.pipe] = before + passed_s if child.stopped else 0.0
            if before < STOPPED_S <= stopped_s[child.pipe]:
                how = f"it was stopped by a signal and not continued for {STOPPED_S:g} s"
                self._reports.put(_lost(child, how, "See who stops processes here; a debugger does, and Ctrl-Z."))


def _pipe(num_workers: int) -> tuple[int, int]:
    """A pipe that holds much, if the system lets it: each time that one fills, two processes wait for each other."""
    reading, writing = os.pipe()
    with suppress(AttributeError, OSError):  # not Linux, or a person has all that their pipes may hold
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, min(PIPE_BYTES, PIPES_BYTES // num_workers))
    return reading, writing


def _fork(task: Task, worker: int, connect: Connect, children: Sequence[Child]) -> Child:
    reading, writing = _pipe(task.plan.num_workers)

    def live() -> None:
        torch.set_num_threads(1)  # first of all: a forked pool of more threads would hang
        for number in ENDING:  # a scheduler sends them to all processes; the launcher then ends the run in good order
            signal.signal(number, signal.SIG_IGN)
        for descriptor in (reading, *(child.pipe for child in children)):
            os.close(descriptor)
        _main(task, worker, connect, writing)

    try:
        return Child(worker, fork(live), reading)
    except RunError:
        os.close(reading)
        raise
    finally:
        os.close(writing)


def _main(task: Task, worker: int, connect: Connect, writing: int) -> None:
    sender = _Sender(writing)
    try:
        if task.prepare is not None:
            task.prepare(worker)
        work(task, worker, connect(worker), sender.put)
    except Exception as error:  # it met nobody; once it works, its errors are told by itself
        sender.put(failure(worker, error if isinstance(error, RoundelayError) else _not_met(worker, error)))
    finally:
        sender.finish()


@final
class _Sender:
    """Writes reports into a pipe, in a thread of its own: a worker waits for a copy of its state, not for the pipe."""

    def __init__(self, writing: int) -> None:
        self._writing = writing
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self.put = self._reports.put
        self._thread = threading.Thread(target=self._main, name="sender", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when everything is written; a launcher that is gone ends this process before."""
        self._reports.put(None)
        self._thread.join()

    def _main(self) -> None:
        torch.set_num_threads(1)
        with suppress(BrokenPipeError):  # the launcher is gone, and this process will be in a moment
            while (report := self._reports.get()) is not None:
                for piece in _pieces(report):
                    write_all(self._writing, piece)
                if self._reports.empty():
                    time.sleep(HANDFUL_S)  # to be woken by each costs the worker more than telling it


def _pieces(report: Report) -> list[bytes | memoryview]:
    """A report's pieces, or those of why it cannot be told."""
    try:
        return pieces_of(report)
    except Exception as error:
        return pieces_of(instead(report, error))


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write bytes to a pipe, however few it takes at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _unread(error: Exception) -> InternalError:
    return InternalError(
        "the launcher",
        got=f"{type(error).__name__}: {error}",
        expected="reports of its workers that it can read",
        remedy="If memory ran out, it holds the newest state of all stages; else report this as a bug.",
    )


def _not_met(worker: int, error: Exception) -> RunError:
    return RunError(
        f"worker {worker}, before it met the others",
        got=f"{type(error).__name__}: {error}",
        expected="connections to the others, and threads that serve them",
        remedy="See `roundelay doctor` for the limits of this machine; ROUNDELAY_DEBUG=1 shows the traceback.",
    )


def _died(child: Child) -> Report:
    child.wait(END_S)
    status = child.status()
    if status is not None and os.WIFSIGNALED(status):
        return _lost(child, f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}")
    return _lost(child, "it ended without a word")


def _lost(
    child: Child,
    how: str,
    remedy: str = "If the system killed it for memory, use smaller micro-batches or more workers.",
) -> Report:
    error = WorkerLostError(
        f"worker {child.worker} (process {child.pid})",
        got=how,
        expected="a worker that lives until the run ends",
        remedy=remedy,
    )
    return failure(child.worker, error)


def _end(children: Sequence[Child], grace_s: float) -> None:
    """Wait a little, then kill what still runs, and reap it."""
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
