"""Handles the end of a DataLoader's worker processes and torch's SIGCHLD handler for them.

A DataLoader used in the main thread permanently installs a SIGCHLD handler, which raises in that thread when any
loader process is killed, whatever the thread is doing. The reader calls its loader in a thread of its own, where torch
detects the end of a process itself and raises the error in the right place; the handler would raise a second one.
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
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

_HANDLING = "torch.utils.data._utils.signal_handling"
_IS_SET = "_SIGCHLD_handler_set"
_SERVER = "multiprocessing.forkserver"
_ENDING = "roundelay.runtime.processes.loader_exit"


def forget_loaders() -> None:
    """Reset, in a forked child, what torch and multiprocessing remember of the parent's loaders.

    The parent's fork server (``multiprocessing_context="forkserver"``) is not a child of this process, which would wait
    for it in vain, so this process starts its own.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _IS_SET in (known := _torch_state()):
        known[_IS_SET] = False
    if _SERVER in sys.modules:  # imported by torch
        server: Any = vars(sys.modules[_SERVER])["_forkserver"]
        alive, preload = server._forkserver_alive_fd, server._preload_modules
        server.__init__()
        server._preload_modules = [*preload, _ENDING]
        if alive is not None:
            os.close(alive)  # otherwise the parent's server would live as long as this process


def join_all(processes: Sequence[Any], seconds: float) -> None:
    """Wait for the end of all of these processes, at most ``seconds`` for all of them together."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def end_loaders() -> None:
    """End the multiprocessing children of a forked child, which exits by ``os._exit``.

    These are processes of loaders that are still open, such as persistent ones, and what they share.
    """
    own = [process for process in multiprocessing.active_children() if vars(process)["_parent_pid"] == os.getpid()]
    for process in own:
        process.terminate()
    join_all(own, _END_S)
    finalizers: Any = multiprocessing.util
    finalizers._run_finalizers(0)


_END_S = 1.0
"""Seconds that loader processes get to end after SIGTERM."""


def _end_sigterm_blocked() -> None:
    """Kill loader processes that block SIGTERM when the interpreter exits, which would otherwise wait for them.

    A reader thread blocks SIGTERM, and processes started by its loader inherit that; multiprocessing ends its children
    by SIGTERM only.
    """
    own = [process for process in multiprocessing.active_children() if process.daemon and _blocks_sigterm(process.pid)]
    if own and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for process in own:
        process.terminate()
    join_all(own, _BLOCKED_END_S)
    for process in own:
        if process.is_alive():
            process.kill()


def _blocks_sigterm(pid: int | None) -> bool:
    """Whether a process blocks SIGTERM, by ``/proc``; the user's other processes are left alone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            blocked = next(line for line in status if line.startswith("SigBlk"))
    except (OSError, StopIteration):
        return False
    return bool(int(blocked.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


_BLOCKED_END_S = 0.2

atexit.register(_end_sigterm_blocked)  # registered after multiprocessing's own, hence called before it


@contextmanager
def without_sigchld_handler() -> Generator[None, None, None]:
    """Disable torch's SIGCHLD handler while other threads use loaders; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known, before = _torch_state(), signal.getsignal(signal.SIGCHLD)
    was_set = known.get(_IS_SET, False)
    ours = getattr(before, "__module__", "") == _HANDLING
    try:
        known[_IS_SET] = True  # otherwise a loader used in this thread meanwhile, by `evaluate`, would install it
        if ours:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        known[_IS_SET] = was_set
        if ours:
            signal.signal(signal.SIGCHLD, before)


def _torch_state() -> dict[str, Any]:
    """The globals of torch's signal-handling module; empty if it is not imported."""
    return vars(sys.modules[_HANDLING]) if _HANDLING in sys.modules else {}
