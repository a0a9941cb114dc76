"""What a worker's process says when nobody listens any more, and a launcher that cannot read what it hears."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import roundelay
from roundelay.errors import InternalError
from roundelay.runtime import processes
from roundelay.runtime.report import Incoming, Report
from tests.api.jobs import make


def test_a_worker_whose_launcher_was_killed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a moment left, in which a traceback would hide why the launcher was killed."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    reading, writing = processes._pipe(1)
    try:
        os.close(reading)
        sender = processes._Sender(writing)
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
    pair = processes._pipe(workers)
    try:
        assert fcntl.fcntl(pair[1], fcntl.F_GETPIPE_SZ) == (size if size <= limit else 1 << 16)
    finally:
        for end in pair:
            os.close(end)


def test_a_launcher_that_cannot_read_a_report_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread that reads them is gone, and would be waited for without end."""

    def fails(incoming: Incoming, size: int) -> Iterator[Report]:
        raise MemoryError("no room for a state")

    job = make()
    monkeypatch.setattr(Incoming, "filled", fails)
    with pytest.raises(InternalError, match="the launcher: got MemoryError: no room for a state"):
        roundelay.train(job, plan=roundelay.plan(job, workers=2, transport="shm"), steps=4)


def test_the_signals_that_end_a_run_are_held_off_while_a_worker_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGALRM, too: by it an interrupt is raised again that somebody dropped."""
    fork, held = os.fork, list[set[signal.Signals | int]]()

    def watched() -> int:
        held.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return fork()

    job = make()
    monkeypatch.setattr(os, "fork", watched)
    roundelay.train(job, plan=roundelay.plan(job, workers=2, transport="shm"), steps=4)
    assert len(held) == 2
    assert all({signal.SIGINT, signal.SIGTERM, signal.SIGALRM} <= each for each in held)
