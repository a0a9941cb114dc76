"""Processes that must not outlive what they belong to: a child its parent, a member that hangs its run.

What is asked of the system here is Linux's; elsewhere a process is ended by its broken pipes and connections alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def die_with(parent: int, libc: ctypes.CDLL) -> None:
    """Have the system end this process when its parent is killed.

    Args:
        parent: number of the process that it belongs to; if that has gone already, this process ends at once.
        libc: the C library, loaded before any fork.
    """
    if hasattr(libc, "prctl"):
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def keep_children(libc: ctypes.CDLL) -> None:
    """Have the system end what this process forks from now on, such as a loader's processes, with it.

    More exactly, with the thread that forks: only for a process whose loader is asked by one thread to the end.

    Args:
        libc: the C library, loaded before any fork.
    """
    if hasattr(libc, "prctl"):
        os.register_at_fork(after_in_child=lambda: libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL))


def whereabouts(pid: int) -> str:
    """A process, told apart from all others of any host and time; empty where the system does not say.

    The host since it was booted, the process's number, and when it was started: numbers are used again.
    """
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{booted} {pid} {started}"


def end(whereabouts_then: str) -> bool:
    """Kill the process that :func:`whereabouts` has told; whether it was on this host and still there."""
    words = whereabouts_then.split()
    if len(words) != 3 or whereabouts(int(words[1])) != whereabouts_then:
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.kill(int(words[1]), signal.SIGKILL)
        return True
    return False
