"""A separate program, child of each process that a launcher has started, which ends its parent if that stays stopped.

The processes of a launcher are not parents of one another, so the system does not notify them that one is stopped
(SIGSTOP), and the launcher does not check. A missed heartbeat proves less: a library may hold the interpreter for a
minute in a healthy process.
Its end closes its connections, so that the others know at once, and the launcher does, too. What the process has
forked, such as a loader's processes, holds these connections as well: when it is killed, they are ended with it.

``python -I -S stop_watchdog.py PROCESS GROUP SECONDS WHO`` loads neither torch nor anything else of Roundelay.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

STOPPED_S = 3.0
"""Seconds after which a stopped process is ended; counted in polls, so time in which all are frozen is excluded."""

_POLL_S = 0.25
_SIGNAL_ME = 1  # PR_SET_PDEATHSIG of prctl(2)


def start_watchdog(who: str) -> None:
    """Start a watchdog that ends this process if it stays stopped; call it in the main thread, before other threads.

    Does nothing where there is no usable ``/proc``, or no child can be started.

    Args:
        who: name of this process in the watchdog's message.
    """
    if _stat(os.getpid())[:1] != [str(os.getpid())]:
        return
    with suppress(OSError):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(os.getpgrp()), str(STOPPED_S), who],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # it does not get the terminal's signals
        )
        atexit.register(_dismiss, child)


def _dismiss(child: subprocess.Popen[bytes]) -> None:
    """Stop the watchdog: this process exits normally."""
    child.kill()
    child.wait()


def watch(parent: int, group: int, patience_s: float, who: str) -> None:
    """Poll `parent` until it is gone, and kill it when it has been stopped for `patience_s` seconds.

    Its own children are killed with it if its process `group` is its own, as launchers set it up.
    """
    with suppress(OSError, AttributeError):  # continue, if stopped, when the parent ends
        ctypes.CDLL(None).prctl(_SIGNAL_ME, signal.SIGCONT)
    stopped_s = 0.0
    while os.getppid() == parent and stopped_s <= patience_s:
        stopped_s = stopped_s + _POLL_S if _stat(parent)[2:3] == ["T"] else 0.0  # not `t`: that is a debugger
        time.sleep(_POLL_S)
    ended = os.getppid() == parent
    with suppress(ProcessLookupError):
        if group == parent:
            os.killpg(parent, signal.SIGKILL)
        elif ended:
            os.kill(parent, signal.SIGKILL)
    if ended:
        signal.alarm(1)  # stderr may be a pipe that is not read
        with suppress(OSError):
            message = f"was stopped by a signal and not continued for {patience_s:g} s, so it was ended"
            sys.stderr.write(f"roundelay: {who} (process {parent}) {message}\n")
            sys.stderr.flush()


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat``: pid, name, state and so on; empty if it cannot be read."""
    with suppress(OSError):
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        number, _, name = before.partition(" (")
        return [number, name, *after.split()]
    return []


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
