"""A program of its own, and a child of each process that a launcher has started: it ends one that stays stopped.

Nobody in a party is the parent of anybody and would be told that a process is stopped (SIGSTOP), and the launcher does
not look. A beat that is missed says less: a library may hold the interpreter for a minute, and the process is well.
Its end then closes its connections, so that the others, on any host, know at once, and the launcher does, too.

``python -I -S sentry.py PROCESS SECONDS WHO`` loads neither torch nor anything else of Roundelay.
"""

from __future__ import annotations

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


def start_sentry(who: str) -> None:
    """Have this process ended when it stays stopped; call it in the main thread, before there are others.

    Args:
        who: what it is called when that is told.
    """
    if Path("/proc/self/stat").exists():
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(STOPPED_S), who],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what a terminal sends to all is not for it
        )


def watch(parent: int, patience_s: float, who: str) -> None:
    """Look at `parent` until it has gone, and end it when it has been stopped for `patience_s` seconds."""
    stopped_s = 0.0
    while os.getppid() == parent:
        stopped_s = stopped_s + _LOOK_S if _is_stopped(parent) else 0.0
        if stopped_s > patience_s:
            told = f"was stopped by a signal and not continued for {patience_s:g} s, so it was ended"
            sys.stderr.write(f"roundelay: {who} (process {parent}) {told}\n")
            os.kill(parent, signal.SIGKILL)
            return
        time.sleep(_LOOK_S)


def _is_stopped(pid: int) -> bool:
    """By a signal; not by a debugger (``t``)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
