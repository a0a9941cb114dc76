"""Children that die or run into limits without hurting the process that tests."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

_CHANGING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.listdir", "os.scandir"}


def dying(act: Callable[[], None], step: int) -> Callable[[], None]:
    """``act``, in a child that is killed before its ``step``-th operation on a file or folder, from 1."""

    def child() -> None:
        done = 0

        def count(event: str, args: tuple[Any, ...]) -> None:
            nonlocal done
            done += event in _CHANGING
            if event in _CHANGING and done == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        act()

    return child


def forked(child: Callable[[], None]) -> int:
    """Run ``child`` in a fork of this process, which then ends without any clean-up; its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns when another thread happens to run
        pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()  # pytest shows it with the failure
        finally:
            os._exit(1)
    return pid


def status(pid: int) -> int:
    """Exit status of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
