"""Processes that must not outlive what they belong to, a child its parent, a member its launcher; and how to fork one.

What is asked of the system here is Linux's; elsewhere a process is ended by its broken pipes and connections alone.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from roundelay.errors import RunError
from roundelay.runtime.loader_processes import end_loaders, forget_loaders

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def fork(live: Callable[[], None]) -> int:
    """Fork a child that is deaf to Ctrl-C, which its parent hears, and ends by SIGTERM and with the thread that forks.

    It draws the same random numbers as its parent would: Python seeds its own anew in a child, and numpy does not.
    What it forks ends with it. Let interrupts wait until its number is noted (:mod:`roundelay.deferred_signals`).

    Args:
        live: all that the child does; then it ends, with 1 if that raised.

    Returns:
        the child's process number.

    Raises:
        RunError: if the system starts no further process.
    """
    libc, parent, drawing = ctypes.CDLL(None), os.getpid(), random.getstate()
    flush_output()  # else the child would write what waits once more
    try:
        pid = os.fork()
        if not pid:
            random.setstate(drawing)
            _live(live, parent, libc)
    except BaseException as error:
        if os.getpid() != parent:  # a handler raised in the child, which must not go on as a second one of us
            os._exit(1)
        if isinstance(error, OSError):
            raise _refused(error) from error
        raise
    return pid


def _live(live: Callable[[], None], parent: int, libc: ctypes.CDLL) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        forget_loaders()
        die_with(parent, libc)
        keep_children(libc)
        live()
        status = 0
        end_loaders()
    finally:
        flush_output()
        os._exit(status)


def flush_output() -> None:
    """Write what has been printed, as far as somebody takes it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or None, or whatever a notebook has put there
            stream.flush()


def _refused(error: OSError) -> RunError:
    return RunError(
        "the system",
        got=f"{error.strerror!r} when another process was to be started",
        expected="room for it",
        remedy="See its limits on processes (`ulimit -u`, a container's) and its free memory. Fewer workers need "
        "fewer, and --no-baseline one less.",
    )


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

    More exactly, with the thread that forks: one that runs a person's code may end with this process only, see
    :func:`outlast`.

    Args:
        libc: the C library, loaded before any fork.
    """
    if hasattr(libc, "prctl"):
        os.register_at_fork(before=_note_parent, after_in_child=lambda: die_with(_PARENT[0], libc))
        _KEEPING.set()


_PARENT = [0]
"""The process that forks."""

_KEEPING = threading.Event()
"""Set where children end with the thread that has forked them."""


def _note_parent() -> None:
    _PARENT[0] = os.getpid()


def outlast() -> None:
    """Keep the calling thread, a daemon that has done its work, where what it has forked would end with it.

    A loader's processes may belong to the person's loader, and serve its next epoch in another thread.
    """
    if _KEEPING.is_set():
        threading.Event().wait()
