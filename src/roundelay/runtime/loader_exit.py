"""Imported by a server that a worker's loader forks its processes from, and by nothing else: they end with the worker.

multiprocessing starts the server (``multiprocessing_context="forkserver"``) as a program of its own. It would outlive a
worker that is killed for as long as its processes do, and these for as long as the server does.
"""

import ctypes
import os

from roundelay.runtime.child_process import die_with, keep_children

_LIBC = ctypes.CDLL(None)
die_with(os.getppid(), _LIBC)
keep_children(_LIBC)
