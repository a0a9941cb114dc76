"""Who hears of a DataLoader's processes: torch, in the thread that asks them; not whoever runs the main thread.

A DataLoader that is used in the main thread gives SIGCHLD a handler, for good, which raises in that thread when any
loader's process is killed, whatever the thread does then. A reader asks its loader in a thread of its own, where torch
finds by itself that a process is gone: there the error has its place, and beside it the handler would be a second one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_HANDLING = "torch.utils.data._utils.signal_handling"
_IS_SET = "_SIGCHLD_handler_set"
_SERVER = "multiprocessing.forkserver"
_ENDING = "roundelay.runtime.loader_exit"


def forget_loaders() -> None:
    """Forget, in a forked child, that its parent has used a loader; one that its main thread uses is heard again.

    A server that the parent forks processes from (``multiprocessing_context="forkserver"``) is no child of this one,
    which would wait for it in vain: it starts its own.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _IS_SET in (known := _torch()):
        known[_IS_SET] = False
    if _SERVER in sys.modules:  # torch has loaded it
        server: Any = vars(sys.modules[_SERVER])["_forkserver"]
        alive, preload = server._forkserver_alive_fd, server._preload_modules
        server.__init__()
        server._preload_modules = [*preload, _ENDING]
        if alive is not None:
            os.close(alive)  # or the parent's would live as long as this process


def end_loaders() -> None:
    """End, in a forked child that will not leave its interpreter in good order, what it has started by multiprocessing.

    These are processes of loaders that are still there, as persistent ones are, and what they have shared.
    """
    own = [process for process in multiprocessing.active_children() if vars(process)["_parent_pid"] == os.getpid()]
    for process in own:
        process.terminate()
    deadline = time.monotonic() + _END_S
    for process in own:
        process.join(max(0.0, deadline - time.monotonic()))
    finalizers: Any = multiprocessing.util
    finalizers._run_finalizers(0)


_END_S = 1.0
"""Seconds that they get to end."""


def _end_deaf_ones() -> None:
    """End a loader's processes when the interpreter ends, which else waits for them.

    A reader's thread leaves SIGTERM to its process, and so do the processes that its loader starts there, by which
    multiprocessing would end them.
    """
    own = [process for process in multiprocessing.active_children() if process.daemon and _is_deaf(process.pid)]
    if own and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for process in own:
        process.terminate()
    deadline = time.monotonic() + _DEAF_S
    for process in own:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()


def _is_deaf(pid: int | None) -> bool:
    """Whether a process has SIGTERM blocked, as Linux tells; the person's own processes end as they like."""
    try:
        with open(f"/proc/{pid}/status") as status:
            blocked = next(line for line in status if line.startswith("SigBlk"))
    except (OSError, StopIteration):
        return False
    return bool(int(blocked.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


_DEAF_S = 0.2

atexit.register(_end_deaf_ones)  # registered after multiprocessing's own, so called before it


@contextmanager
def loaders_unheard() -> Generator[None, None, None]:
    """Have torch's handler hear nothing, while loaders are asked in other threads; in other threads it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known, before = _torch(), signal.getsignal(signal.SIGCHLD)
    was_set = known.get(_IS_SET, False)
    ours = getattr(before, "__module__", "") == _HANDLING
    try:
        known[_IS_SET] = True  # or a loader that is asked in this thread meanwhile, by `evaluate`, would set it
        if ours:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        known[_IS_SET] = was_set
        if ours:
            signal.signal(signal.SIGCHLD, before)


def _torch() -> dict[str, Any]:
    """What torch knows of its handler, if it is loaded."""
    return vars(sys.modules[_HANDLING]) if _HANDLING in sys.modules else {}
