"""Runs a backward in a forked process, as every run with worker processes does: some builds of torch do not allow it.

A child does what a run's main process does (start autograd, have torch register the devices that ``torch.export``
pretends to have) and then forks a process that computes a gradient, as a worker does.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
from collections.abc import Callable
from typing import Any

_WORKER_S, _MAIN_S = 20.0, 30.0
"""Seconds after which the worker, and the process that forks it, is considered hung."""


def forked_backward_error() -> str:
    """Why a forked process cannot compute a gradient; empty if it can."""
    return _error_in_child(_as_main_process, _MAIN_S)


def _as_main_process() -> str:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    safety: Any = importlib.import_module("roundelay.fork_safety")
    pretend: Callable[[], object] = getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)
    pretend()  # as torch.export does where there is no GPU; private, so it may be missing
    if safety.STARTED_WITHOUT_DEVICES:  # else a run computes gradients in forked processes only
        safety.one_backward()
    return _error_in_child(lambda: safety.one_backward() or "", _WORKER_S)


def _error_in_child(function: Callable[[], str], limit_s: float) -> str:
    """Call a function in a forked child; returns the error that it returns or raises, or how the child ended."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as received, open(writing, "wb", buffering=0) as sent:
        pid = os.fork()
        if not pid:
            try:
                sent.write(_error_of(function).encode()[:300])
            finally:
                os._exit(0)
        sent.close()
        in_time = bool(select.select([received], [], [], limit_s)[0])  # readable at the child's end, too
        error = received.readall().decode(errors="replace") if in_time else "it hangs"
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return error or (f"it ends with {code}" if code else "")


def _error_of(function: Callable[[], str]) -> str:
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
