"""A real fork with a backward in it, as every run of processes has: some builds of torch allow none.

Tried in a child, which does what a run's first process does (start autograd, have torch register the devices that its
exporter pretends, compute a gradient) and then forks one that computes a gradient, as a worker does.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 20.0

_WELL, _FAILED = 0, 1


def forked_backward_error() -> str:
    """Why a forked process cannot compute a gradient; empty if it can, or where nothing can be forked."""
    if not hasattr(os, "fork"):
        return ""
    reading, writing = os.pipe()
    try:
        status = _status_of(lambda: _as_a_run(writing))
        os.close(writing)
        writing = -1
        why = os.read(reading, 4096).decode(errors="replace")
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if status == _WELL:
        return ""
    return why or ("it hangs" if status is None else f"it ends with {status}")


def _as_a_run(writing: int) -> None:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    safety: Any = importlib.import_module("roundelay.fork_safety")
    pretend: Callable[[], object] = getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)
    pretend()  # as torch.export does where it sees no GPU, and has this function: it is private
    if safety.STARTED_WITHOUT_DEVICES:  # else a run computes gradients in children only
        safety.one_backward()

    def worker() -> None:
        try:
            safety.one_backward()
        except Exception as error:
            os.write(writing, f"{type(error).__name__}: {' '.join(str(error).split())}".encode()[:300])
            raise

    status = _status_of(worker)
    if status != _WELL:
        raise ChildProcessError(f"the worker's part ended with {status}")


def _status_of(live: Callable[[], None]) -> int | None:
    """How a forked child ends that does this: 0, a number, minus a signal's; None if it hangs, and is killed."""
    pid = os.fork()
    if not pid:
        code = _FAILED
        try:
            live()
            code = _WELL
        finally:
            os._exit(code)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None
