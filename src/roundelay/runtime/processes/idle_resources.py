"""Gives back what planning has used in this thread and its workers cannot: waiting threads and free memory.

GNU's OpenMP counts the threads of all teams in a process, of idle ones too, and in a forked child those of its parent.
Where they are more than the processors, a thread that waits for its team sleeps at once instead of looking again for
some microseconds: a worker of two threads on two cores was 15 % slower while the team with which the main thread had
planned still waited for more.

GNU's C library keeps what is freed for the thread that had it, so that the workers' threads would take as much again.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")
_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0, section 3.2.44: what was set, such as the number of threads, stays."""


def give_back_idle() -> None:
    """End this thread's waiting threads, and return to the system the memory that is free."""
    end_idle_threads()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def end_idle_threads() -> None:
    """End the threads that wait for the calling thread's next parallel region, which then starts new ones.

    Only on Linux, with a library that has ``omp_pause_resource_all``; elsewhere they stay.
    """
    for pause in _pauses():
        pause(_SOFT)


@cache
def _pauses() -> tuple[Callable[[int], int], ...]:
    """That function of each OpenMP library that this process had loaded at the first call; torch's is among them."""
    paths: set[str] = set()
    with suppress(OSError):
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if _OPENMP.search(line)}
    found = []
    for path in sorted(paths):
        with suppress(OSError, AttributeError):
            found.append(ctypes.CDLL(path).omp_pause_resource_all)
    return tuple(found)
