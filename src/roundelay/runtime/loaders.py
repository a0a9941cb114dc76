"""Who hears of a DataLoader's processes: torch, in the thread that asks them; not whoever runs the main thread.

A DataLoader that is used in the main thread gives SIGCHLD a handler, for good, which raises in that thread when any
loader's process is killed, whatever the thread does then. A reader asks its loader in a thread of its own, where torch
finds by itself that a process is gone: there the error has its place, and beside it the handler would be a second one.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_HANDLING = "torch.utils.data._utils.signal_handling"
_IS_SET = "_SIGCHLD_handler_set"


def hear_no_loaders() -> None:
    """Forget, in a forked child, that its parent has used a loader; one that its main thread uses is heard again."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _IS_SET in (known := _torch()):
        known[_IS_SET] = False


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
