"""A program of its own, and a child of each process that a launcher has started: it ends one that stays stopped.

Nobody in a party is the parent of anybody and would be told that a process is stopped (SIGSTOP), and the launcher does
not look. A beat that is missed says less: a library may hold the interpreter for a minute, and the process is well.
Its end closes its connections, so that the others know at once, and the launcher does, too. What the process has
forked, such as a loader's processes, holds these connections as well: when it is killed, they are ended with it.

``python -I -S sentry.py PROCESS GROUP SECONDS WHO`` loads neither torch nor anything else of Roundelay.
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
"""Seconds after which a stopped process is ended. They are counted in looks: where all are frozen, nobody is late."""

_LOOK_S = 0.25
_SIGNAL_ME = 1  # PR_SET_PDEATHSIG of prctl(2)


def start_watchdog(who: str) -> None:
    """Have this process ended when it stays stopped; call it in the main thread, before there are others.

    Without ``/proc`` of its own, or where no child can be started, it goes on without.

    Args:
        who: what it is called when that is told.
    """
    if _stat(os.getpid())[:1] != [str(os.getpid())]:
        return
    with suppress(OSError):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(os.getpgrp()), str(STOPPED_S), who],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what a terminal sends to all is not for it
        )
        atexit.register(_dismiss, child)


def _dismiss(child: subprocess.Popen[bytes]) -> None:
    """The process ends by itself, so nobody need end what it leaves."""
    child.kill()
    child.wait()


def watch(parent: int, group: int, patience_s: float, who: str) -> None:
    """Look at `parent` until it has gone, and end it when it has been stopped for `patience_s` seconds.

    What it has forked is ended with it, if its `group` of processes is its own: a launcher gives each one.
    """
    with suppress(OSError, AttributeError):  # one that is stopped itself goes on when its parent ends
        ctypes.CDLL(None).prctl(_SIGNAL_ME, signal.SIGCONT)
    stopped_s = 0.0
    while os.getppid() == parent and stopped_s <= patience_s:
        stopped_s = stopped_s + _LOOK_S if _stat(parent)[2:3] == ["T"] else 0.0  # not `t`: that is a debugger
        time.sleep(_LOOK_S)
    ended = os.getppid() == parent
    with suppress(ProcessLookupError):
        if group == parent:
            os.killpg(parent, signal.SIGKILL)
        elif ended:
            os.kill(parent, signal.SIGKILL)
    if ended:
        signal.alarm(1)  # nobody may read what is told
        with suppress(OSError):
            told = f"was stopped by a signal and not continued for {patience_s:g} s, so it was ended"
            sys.stderr.write(f"roundelay: {who} (process {parent}) {told}\n")
            sys.stderr.flush()


def _stat(pid: int) -> list[str]:
    """What the system says of a process: number, name, state and more; empty if it is gone, or nothing is said."""
    with suppress(OSError):
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        number, _, name = before.partition(" (")
        return [number, name, *after.split()]
    return []


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
