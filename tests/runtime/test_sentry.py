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

from roundelay.runtime import sentry

LIVES = """
import time
from roundelay.runtime.sentry import start_sentry
start_sentry("worker 7")
print("ready", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def living() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a sentry, and the sentry's number."""
    process = subprocess.Popen([sys.executable, "-c", LIVES], stdout=-1, stderr=-1, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process, int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    finally:
        process.kill()
        process.communicate()


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_a_process_that_stays_stopped_is_ended_and_that_is_told() -> None:
    with living() as (process, watcher):
        process.send_signal(signal.SIGSTOP)
        said = process.communicate(timeout=30.0)[1]
        assert process.returncode == -signal.SIGKILL
        told = f"roundelay: worker 7 (process {process.pid}) was stopped by a signal and not continued for 3 s"
        assert said == f"{told}, so it was ended\n"
        assert gone(watcher, 5.0)


def test_a_process_that_goes_on_is_left_alone() -> None:
    with living() as (process, _):
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            time.sleep(sentry.STOPPED_S / 2)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.6)  # two looks
        assert process.poll() is None


def test_a_process_whose_interpreter_is_held_is_left_alone() -> None:
    """None of its threads could beat, and it is well: the system knows."""
    held = LIVES.replace("time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(5); print('well', flush=True)")
    done = subprocess.run([sys.executable, "-c", held], capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stdout) == (0, "ready\nwell\n")


def test_it_goes_when_its_process_does_and_hears_no_terminal() -> None:
    with living() as (process, watcher):
        assert os.getsid(watcher) == watcher
        process.kill()
        process.wait()
        assert gone(watcher, 5.0)
