"""Who ends a process that stays stopped, where nobody is its parent and cares."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from roundelay.launching.stop_watchdog import STOPPED_S
from tests.conftest import alive

LIVES = """
import os, sys, time
from roundelay.launching.stop_watchdog import start_watchdog
start_watchdog("worker 7")
child = os.fork()
if not child:
    os.close(1), os.close(2)  # who reads what its parent tells does not wait for it
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


class Living(NamedTuple):
    """A process that has a watchdog, and has forked another."""

    process: subprocess.Popen[str]
    watchdog: int
    child: int


@contextlib.contextmanager
def living(stderr: int = subprocess.PIPE) -> Iterator[Living]:
    """In a session of its own, as a launcher starts it. It ends in good order when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIVES], stdin=-1, stdout=-1, stderr=stderr, text=True, start_new_session=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    children = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    watchdog = next(pid for pid in children if pid != child)
    try:
        yield Living(process, watchdog, child)
    finally:
        for pid in (child, watchdog):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_a_process_that_stays_stopped_is_ended_and_that_is_told() -> None:
    with living() as (process, watchdog, child):
        process.send_signal(signal.SIGSTOP)
        said = process.communicate(timeout=30.0)[1]
        assert process.returncode == -signal.SIGKILL
        told = f"roundelay: worker 7 (process {process.pid}) was stopped by a signal and not continued for 3 s"
        assert said == f"{told}, so it was ended\n"
        assert gone(child, 20.0), "it holds the connections of the one that was ended"
        assert gone(watchdog, 20.0)


def test_a_process_is_ended_though_nobody_reads_what_is_told() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with living(writing) as (process, watchdog, _):
        process.send_signal(signal.SIGSTOP)
        assert process.wait(30.0) == -signal.SIGKILL
        assert gone(watchdog, 20.0)
    os.close(writing)


def test_a_process_that_goes_on_is_left_alone() -> None:
    with living() as (process, _, _):
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S / 2)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.6)  # two looks
        assert process.poll() is None


def test_a_process_whose_interpreter_is_held_is_left_alone() -> None:
    """None of its threads could beat, and it is well: the system knows."""
    held = LIVES.replace("sys.stdin.read()", "import ctypes; ctypes.PyDLL(None).sleep(5); os.kill(child, 9)")
    done = subprocess.run([sys.executable, "-c", held], capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_killed_process_had_forked_is_ended() -> None:
    with living() as (process, watchdog, child):
        assert os.getsid(watchdog) == watchdog, "a terminal's signals are not for it"
        process.kill()
        process.wait()
        assert gone(child, 20.0)
        assert gone(watchdog, 20.0)


def test_what_a_process_leaves_that_ends_by_itself_is_left_alone() -> None:
    with living() as (process, watchdog, child):
        process.communicate("")
        assert process.returncode == 0
        assert gone(watchdog, 0.0)
        time.sleep(0.5)
        assert alive(child)


def test_a_watchdog_that_is_stopped_ends_with_its_process_all_the_same() -> None:
    with living() as (process, watchdog, child):
        time.sleep(1.0)  # until it has begun
        os.kill(watchdog, signal.SIGSTOP)
        process.kill()
        process.wait()
        assert gone(watchdog, 20.0)
        assert gone(child, 20.0)
