"""What a worker's process says when nobody listens any more, and a launcher that cannot read what it hears."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import roundelay
from roundelay.errors import InternalError, RunError
from roundelay.launching import forked_workers
from roundelay.runtime.processes.worker_messages import Report, ReportAssembler
from roundelay.session import training
from roundelay.transport import shm
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.shm_resources import ShmResources
from tests.api.jobs import make
from tests.conftest import alive
from tests.runtime.interrupts import bystander, give, handled


def test_a_worker_whose_launcher_was_killed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a moment left, in which a traceback would hide why the launcher was killed."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    reading, writing = forked_workers._pipe(1)
    try:
        os.close(reading)
        sender = forked_workers._Sender(writing)
        sender.put(Report("progress", 0, {}))
        sender.put(Report("progress", 0, {}))
        sender.finish()
    finally:
        os.close(writing)
    assert not told


@pytest.mark.skipif(not hasattr(fcntl, "F_GETPIPE_SZ"), reason="pipes cannot be asked for their size here")
@pytest.mark.parametrize(("workers", "size"), [(2, 1 << 20), (64, 1 << 19)])
def test_a_pipe_holds_much_and_all_of_them_not_too_much(workers: int, size: int) -> None:
    limit = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    pair = forked_workers._pipe(workers)
    try:
        assert fcntl.fcntl(pair[1], fcntl.F_GETPIPE_SZ) == (size if size <= limit else 1 << 16)
    finally:
        for end in pair:
            os.close(end)


def test_a_launcher_that_cannot_read_a_report_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread that reads them is gone, and would be waited for without end."""

    def fails(incoming: ReportAssembler, size: int) -> Iterator[Report]:
        raise MemoryError("no room for a state")

    job = make()
    monkeypatch.setattr(training, "check_transport", lambda transport: None)  # which hears a child, too
    monkeypatch.setattr(ReportAssembler, "filled", fails)
    with pytest.raises(InternalError, match="the launcher: got MemoryError: no room for a state"):
        roundelay.train(job, plan=roundelay.plan(job, workers=2, transport="shm"), steps=4, check="off")


def test_an_error_in_the_clean_up_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, wait = list[forked_workers.Child](), forked_workers.Child.wait

    def fails(child: forked_workers.Child, seconds: float) -> bool:
        ending.append(child)
        if len(ending) == 1:
            raise OSError("what no system says")
        return wait(child, seconds)

    job = make()
    plan, open_files = roundelay.plan(job, workers=2, transport="shm"), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(training, "check_transport", lambda transport: None)  # which waits for a child, too
    monkeypatch.setattr(forked_workers.Child, "wait", fails)
    with pytest.raises(OSError, match="what no system says"):
        roundelay.train(job, plan=plan, steps=4, check="off")
    assert len({child.pid for child in ending}) == 2
    assert not any(alive(child.pid) for child in ending)
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1])
def test_an_interrupt_while_a_worker_is_forked_leaves_no_worker(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread is given it: that the main thread masks it then says nothing."""
    fork, forked = os.fork, list[int]()

    def interrupted() -> int:
        pid = fork()
        if pid:
            forked.append(pid)
            give(aside, number)
        return pid

    job = make()
    monkeypatch.setattr(os, "fork", interrupted)
    with bystander() as aside, handled(number), pytest.raises(KeyboardInterrupt):
        roundelay.train(job, plan=roundelay.plan(job, workers=2, transport="shm"), steps=4, check="off")
    assert forked
    assert not any(map(alive, forked))


def test_an_interrupt_in_the_clean_up_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one, behind that of a person's who presses Ctrl-C twice."""
    end, ending = forked_workers._end, list[Sequence[forked_workers.Child]]()

    def interrupted(children: Sequence[forked_workers.Child], grace_s: float) -> None:
        ending.append(children)
        signal.raise_signal(signal.SIGINT)
        end(children, grace_s)

    job = make()
    plan, open_files = roundelay.plan(job, workers=2, transport="shm"), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(forked_workers, "_end", interrupted)
    with handled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        roundelay.train(
            job, plan=plan, steps=4, check="off", on_update=lambda update: signal.raise_signal(signal.SIGINT)
        )
    assert len(ending[0]) == 2
    assert not any(alive(child.pid) for child in ending[0])
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_system_without_room_for_a_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where a container may have so many processes and no more."""
    fork, forked = os.fork, list[int]()

    def full() -> int:
        if forked:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(fork())
        return forked[0]

    job = make()
    plan, open_files = roundelay.plan(job, workers=2, transport="shm"), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(RunError, match="'Resource temporarily unavailable' when another process was to be started"):
        roundelay.train(job, plan=plan, steps=4, check="off")
    assert not alive(forked[0])
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_worker_that_cannot_connect_tells_what_it_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where a process may have so many threads and no more: what a library raises is no bug of ours."""
    endpoint = shm.ShmEndpoint

    def full(worker: int, wiring: ShmResources, deadline_s: float) -> Endpoint:
        if worker == 1:
            raise RuntimeError("can't start new thread")
        return endpoint(worker, wiring, deadline_s)

    job = make()
    plan = roundelay.plan(job, workers=2, transport="shm")
    monkeypatch.setattr(shm, "ShmEndpoint", full)
    with pytest.raises(RunError, match="worker 1, connecting to the others: got RuntimeError: can't start new thread"):
        roundelay.train(job, plan=plan, steps=4)
