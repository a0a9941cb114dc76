"""Forks child processes that end with their parent.

This uses ``prctl`` of Linux; on other systems only broken pipes and connections end an orphaned process.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

from roundelay.errors import RunError
from roundelay.runtime.processes.idle_resources import end_idle_threads
from roundelay.runtime.processes.loader_processes import end_loaders, forget_loaders

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def fork(main: Callable[[], None], ignored: Collection[signal.Signals] = ()) -> int:
    """Fork a child that ignores SIGINT, which its parent handles, and ends on SIGTERM and with the forking thread.

    It draws the same random numbers as its parent would: Python reseeds its own generator in a child, numpy does not.
    What the child forks ends with it. Defer signals until its pid is recorded (:mod:`roundelay.deferred_signals`).

    The child works in a thread of its own: where the forking thread has computed on several, with OpenMP, the child's
    first thread would wait for theirs, which it has not.

    Args:
        main: the child's work; then it exits, with status 1 if that raised.
        ignored: further signals that it ignores.

    Returns:
        the child's pid.

    Raises:
        RunError: the system cannot start another process.
    """
    libc, parent, random_state = ctypes.CDLL(None), os.getpid(), random.getstate()
    flush_output()  # otherwise the child would write buffered output again
    end_idle_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 where there are OpenMP's threads
            pid = os.fork()
        if not pid:
            random.setstate(random_state)
            _run_child(main, ignored, parent, libc)
    except BaseException as error:
        if os.getpid() != parent:  # a signal handler raised in the child, which must not go on as a copy
            os._exit(1)
        if isinstance(error, OSError):
            raise _refused(error) from error
        raise
    return pid


def _run_child(
    main: Callable[[], None], ignored: Collection[signal.Signals], parent: int, libc: ctypes.CDLL
) -> NoReturn:
    status = [1]

    def work() -> None:
        with suppress(BaseException):
            main()
            status[0] = 0
            end_loaders()

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGINT, *ignored):
            signal.signal(number, signal.SIG_IGN)
        forget_loaders()
        die_with_parent(parent, libc)
        end_children_with_thread(libc)
        worker = threading.Thread(target=work, name="work")
        worker.start()
        worker.join()
    finally:
        flush_output()
        os._exit(status[0])


def flush_output() -> None:
    """Flush stdout and stderr, ignoring errors."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, None, or a notebook's replacement
            stream.flush()


def _refused(error: OSError) -> RunError:
    return RunError(
        "the system",
        got=f"{error.strerror!r} when another process was to be started",
        expected="a new process",
        remedy="Check the limits on processes (`ulimit -u`, a container's) and the free memory, or use fewer workers; "
        "--no-baseline saves one process.",
    )


def die_with_parent(parent: int, libc: ctypes.CDLL) -> None:
    """Have the system kill this process when its parent ends.

    Args:
        parent: pid of the parent; if that is gone already, this process exits at once.
        libc: the C library, loaded before any fork.
    """
    if hasattr(libc, "prctl"):
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_children_with_thread(libc: ctypes.CDLL) -> None:
    """Have the system kill what this process forks from now on, such as a loader's processes, when it ends.

    More exactly, when the forking thread ends: a thread that runs user code must therefore last as long as this
    process, see :func:`keep_thread_alive`.

    Args:
        libc: the C library, loaded before any fork.
    """
    if hasattr(libc, "prctl"):
        os.register_at_fork(before=_note_parent, after_in_child=lambda: die_with_parent(_PARENT[0], libc))
        _KEEPING.set()


_PARENT = [0]
"""Pid of the forking process."""

_KEEPING = threading.Event()
"""Set if children end with the thread that forked them."""


def _note_parent() -> None:
    _PARENT[0] = os.getpid()


def keep_thread_alive() -> None:
    """Block the calling daemon thread for ever if its child processes would end with it.

    A loader's processes may belong to the user's loader and serve its next epoch in another thread.
    """
    if _KEEPING.is_set():
        threading.Event().wait()
