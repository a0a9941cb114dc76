"""Processes that must not outlive what they belong to: a child its parent, a member its launcher.

What is asked of the system here is Linux's; elsewhere a process is ended by its broken pipes and connections alone.
"""

from __future__ import annotations

import ctypes
import os
import signal

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
