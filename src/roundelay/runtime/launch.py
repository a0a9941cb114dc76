"""Launch the workers of a run, listen to them, and end them: threads over memory, or forked processes over gloo.

The launcher is the one place where processes and threads begin and end. It collects reports until every worker has
finished or one has failed; then it makes sure that nothing is left behind. The first cause of a failure is the error
that is raised; workers that ended because another was lost only confirm it.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from roundelay import errors
from roundelay.errors import RoundelayError, WorkerLostError
from roundelay.runtime.report import Report, Reporter, from_bytes, to_bytes
from roundelay.runtime.worker import Task, work
from roundelay.transport.contract import Endpoint
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.memory import memory_endpoints

Listener = Callable[[Report], None]
Wrap = Callable[[Endpoint], Endpoint]

END_S = 10.0
"""Seconds that workers get to end once the run has ended or failed."""


def run(task: Task, listen: Listener, wrap: Wrap | None = None) -> None:
    """Execute a task on its plan's transport.

    Args:
        task: the run.
        listen: told of every report, in this thread.
        wrap: put around every endpoint, for tests that delay messages.

    Raises:
        RoundelayError: the first cause, if a worker failed.
    """
    around = wrap or (lambda endpoint: endpoint)
    if task.plan.transport == "memory":
        _run_threads(task, listen, around)
    else:
        _run_processes(task, listen, around)


def _run_threads(task: Task, listen: Listener, wrap: Wrap) -> None:
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    endpoints = [wrap(endpoint) for endpoint in memory_endpoints(task.plan.num_stages)]
    threads = [
        threading.Thread(target=_thread_main, args=(task, k, endpoint, reports.put), name=f"worker {k}", daemon=True)
        for k, endpoint in enumerate(endpoints)
    ]
    for thread in threads:
        thread.start()
    tally = _Tally(task.plan.num_stages, listen)
    try:
        while not tally.over:
            tally.take(reports.get())
    finally:
        if not tally.over or tally.failures:
            for endpoint in endpoints:
                endpoint.abort("the run was ended")
        deadline = time.monotonic() + END_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        while not reports.empty():
            tally.late(reports.get())
    tally.raise_failure()


def _thread_main(task: Task, worker: int, endpoint: Endpoint, report: Reporter) -> None:
    torch.set_num_threads(1)  # the number of intra-op threads is each thread's own where OpenMP keeps it
    work(task, worker, endpoint, report)


class _Tally:
    """Who has finished and who has failed."""

    def __init__(self, num_workers: int, listen: Listener) -> None:
        self.num_workers, self.listen = num_workers, listen
        self.ended: set[int] = set()
        self.failures: list[Report] = []

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for."""
        return len(self.ended) == self.num_workers or any(f.data["kind"] != "WorkerLostError" for f in self.failures)

    def take(self, report: Report) -> None:
        """Count a report and pass it on."""
        self.late(report)
        if report.kind in ("finished", "failed"):
            self.ended.add(report.worker)
        if report.kind != "failed":
            self.listen(report)

    def late(self, report: Report) -> None:
        """Keep a failure that came after the end."""
        if report.kind == "failed":
            self.failures.append(report)

    def raise_failure(self) -> None:
        """Raise the first cause, if there is one: what a worker met itself before what it met in another.

        Of a worker that is gone, its own death (with its signal) comes before what the others saw of it.
        """

        def order(failure: Report) -> tuple[bool, bool]:
            lost = failure.data["kind"] == "WorkerLostError"
            return lost, lost and not failure.data["subject"].startswith(f"worker {failure.worker} ")

        ordered = sorted(self.failures, key=order)
        if ordered:
            data = ordered[0].data
            kind = getattr(errors, data["kind"])
            error: RoundelayError = kind(
                data["subject"], got=data["got"], expected=data["expected"], remedy=data["remedy"]
            )
            error.add_note(str(data["trace"]))
            raise error


def _run_processes(task: Task, listen: Listener, wrap: Wrap) -> None:
    with tempfile.TemporaryDirectory(prefix="roundelay-") as folder:
        store = str(Path(folder) / "store")
        children: dict[int, _Child] = {}
        tally = _Tally(task.plan.num_stages, listen)
        try:
            for k in range(task.plan.num_stages):
                children[k] = _fork(task, k, store, wrap, [child.pipe for child in children.values()])
            for report in _reports(children):
                tally.take(report)
                if tally.over:
                    break
            if not tally.failures:
                _await_ends(children)
        finally:
            _end(children)
        tally.raise_failure()


class _Child:
    """A forked worker: its process number and the reading end of its pipe."""

    def __init__(self, worker: int, pid: int, pipe: int) -> None:
        self.worker, self.pid, self.pipe = worker, pid, pipe
        self.status: int | None = None

    def poll(self) -> int | None:
        """Its wait status if it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status


def _fork(task: Task, worker: int, store: str, wrap: Wrap, others: list[int]) -> _Child:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(worker, pid, reading)
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends its children
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not what the parent does when it is told to end
        torch.set_num_threads(1)  # first of all: a forked pool of more threads would hang
        for descriptor in (reading, *others):
            os.close(descriptor)
        _child_main(task, worker, store, wrap, writing)
        status = 0
    finally:
        os._exit(status)


def _child_main(task: Task, worker: int, store: str, wrap: Wrap, writing: int) -> None:
    lock = threading.Lock()

    def report(item: Report) -> None:
        data = to_bytes(item)
        with lock:
            _write_all(writing, struct.pack("<Q", len(data)) + data)

    try:
        endpoint = wrap(GlooEndpoint(worker, task.plan.num_stages, store, task.plan.deadline_s))
    except RoundelayError as error:
        what = {"subject": error.subject, "got": error.got, "expected": error.expected, "remedy": error.remedy}
        report(Report("failed", worker, {"kind": type(error).__name__, **what, "trace": ""}))
        return
    work(task, worker, endpoint, report)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _reports(children: dict[int, _Child]) -> Iterator[Report]:
    """Reports of all children as they come, until every pipe is closed; a child that dies silently is a failure."""
    buffers = {child.pipe: bytearray() for child in children.values()}
    finished: set[int] = set()
    workers = {child.pipe: child for child in children.values()}
    while buffers:
        ready, _, _ = select.select(list(buffers), [], [], 1.0)
        for pipe in ready:
            data = os.read(pipe, 1 << 20)
            buffers[pipe] += data
            for report in _take_reports(buffers[pipe]):
                if report.kind in ("finished", "failed"):
                    finished.add(report.worker)
                yield report
            if not data:
                del buffers[pipe]
                if workers[pipe].worker not in finished:
                    yield _died(workers[pipe])


def _take_reports(buffer: bytearray) -> Iterator[Report]:
    while len(buffer) >= 8:
        (size,) = struct.unpack_from("<Q", buffer)
        if len(buffer) < 8 + size:
            return
        body = bytes(buffer[8 : 8 + size])
        del buffer[: 8 + size]
        position = [0]

        def take(count: int, body: bytes = body, position: list[int] = position) -> bytes:
            position[0] += count
            return body[position[0] - count : position[0]]

        yield from_bytes(take)


def _died(child: _Child) -> Report:
    deadline = time.monotonic() + END_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    status = child.status
    how = "ended without a word"
    if status is not None and os.WIFSIGNALED(status):
        how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    error = WorkerLostError(
        f"worker {child.worker} (process {child.pid})",
        got=f"it {how}",
        expected="a worker that lives until the run ends",
        remedy="If the system killed it for memory, use smaller micro-batches or more workers.",
    )
    what = {"subject": error.subject, "got": error.got, "expected": error.expected, "remedy": error.remedy}
    return Report("failed", child.worker, {"kind": "WorkerLostError", **what, "trace": ""})


def _await_ends(children: dict[int, _Child]) -> None:
    deadline = time.monotonic() + END_S
    while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
        time.sleep(0.005)


def _end(children: dict[int, _Child]) -> None:
    """Kill what still runs, reap it, and close the pipes."""
    for child in children.values():
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            _, child.status = os.waitpid(child.pid, 0)
        os.close(child.pipe)
