"""Processes that must not outlive what they belong to, a child its parent, a member its launcher; and how to fork one.

What is asked of the system here is Linux's; elsewhere a process is ended by its broken pipes and connections alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from roundelay.errors import RunError

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGALRM})  # an alarm raises an interrupt again that got lost


def fork(live: Callable[[], None], note: Callable[[int], None]) -> None:
    """Fork a child that this process knows of, whatever interrupts it: nothing is raised between the fork and the note.

    The child is deaf to Ctrl-C, which its parent hears, and ended by SIGTERM. It ends with its parent, and with it what
    it forks.

    Args:
        live: all that the child does; then it ends, with 1 if that raised.
        note: takes the child's process number.

    Raises:
        RunError: if the system starts no further process.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()
    with _held_off(_ENDING):
        try:
            pid = os.fork()
        except OSError as error:
            raise _refused(error) from error
        if pid:
            note(pid)
        else:
            _live(live, parent, libc)


def _live(live: Callable[[], None], parent: int, libc: ctypes.CDLL) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        die_with(parent, libc)
        keep_children(libc)
        live()
        status = 0
    finally:
        os._exit(status)


def _refused(error: OSError) -> RunError:
    return RunError(
        "the system",
        got=f"{error.strerror!r} when another process was to be started",
        expected="room for it",
        remedy="See its limits on processes (`ulimit -u`, a container's) and its free memory, or use fewer workers.",
    )


@contextmanager
def _held_off(numbers: frozenset[signal.Signals]) -> Generator[None, None, None]:
    """Handle signals that come meanwhile at the end.

    A mask holds them off for one thread. The system gives them to any other, of which torch has some, and Python calls
    its handler in the main thread all the same: there the handler now sends them again, to the thread that masks them.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in numbers if _handles_signals()}

    def send_again(number: int, frame: object) -> None:
        if number not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):  # a forked child, or the end was interrupted
            signal.signal(number, handlers[signal.Signals(number)])
        signal.raise_signal(number)

    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number, handler in handlers.items():
            if handler is not None:  # else it is not Python's
                signal.signal(number, send_again)
        yield
    finally:
        try:
            for number, handler in handlers.items():
                if handler is not None:
                    signal.signal(number, handler)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _handles_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


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
