"""Forked children: what they hear, how they end, and that none goes on as a second one of its parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from roundelay.runtime.processes.child_process import fork
from tests.conftest import alive
from tests.runtime.interrupts import handled


def status(pid: int) -> int:
    """How a child ended: its exit code, or the signal, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_is_deaf_to_ctrl_c_and_ends_when_told() -> None:
    def live() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)

    with handled(signal.SIGINT), handled(signal.SIGTERM):
        assert status(fork(live)) == -signal.SIGTERM


def test_a_child_that_fails_ends_with_one() -> None:
    def live() -> None:
        raise ZeroDivisionError

    parent = os.getpid()
    try:
        assert status(fork(live)) == 1
    finally:
        if os.getpid() != parent:
            os._exit(9)  # the child, which would go on as a second one of us


def test_a_handler_that_raises_in_the_child_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it can say how it handles them, and as any other signal may at any time."""
    system, parent = os.fork, os.getpid()

    def struck() -> int:
        pid = system()
        if not pid:
            signal.raise_signal(signal.SIGHUP)
        return pid

    monkeypatch.setattr(os, "fork", struck)
    with handled(signal.SIGHUP):
        try:
            assert status(fork(lambda: None)) == 1
        finally:
            if os.getpid() != parent:
                os._exit(9)


def test_a_thread_that_handles_no_signals_forks_too() -> None:
    ended = list[int]()
    thread = threading.Thread(target=lambda: ended.append(status(fork(lambda: None))))  # it ends with this thread
    thread.start()
    thread.join()
    assert ended == [0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system ends no child with its parent here")
@pytest.mark.parametrize("own", [True, False], ids=["a child", "what a child has forked"])
def test_with_its_parent_ends(own: bool) -> None:
    """The parent is killed, so that it can end nobody itself."""
    reading, writing = os.pipe()

    def sleep() -> None:
        os.write(writing, str(os.getpid()).encode())
        time.sleep(20.0)

    def have_a_child() -> None:
        if os.fork() == 0:
            sleep()
        time.sleep(20.0)

    parent = os.fork()
    if parent == 0:
        try:
            fork(sleep if own else have_a_child)
            time.sleep(20.0)
        finally:
            os._exit(0)
    os.close(writing)
    pid = int(os.read(reading, 64))
    os.kill(parent, signal.SIGKILL)
    assert status(parent) == -signal.SIGKILL
    deadline = time.monotonic() + 5.0
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)
    os.close(reading)
