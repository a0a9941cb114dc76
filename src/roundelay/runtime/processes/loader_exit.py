"""Ends a loader's fork server with its worker; imported by the server alone.

multiprocessing starts the server (``multiprocessing_context="forkserver"``) as a separate program. Without this, the
server and the processes forked from it would keep each other alive after the worker was killed.
"""

import ctypes
import os

from roundelay.runtime.processes.child_process import die_with_parent, end_children_with_thread

_LIBC = ctypes.CDLL(None)
die_with_parent(os.getppid(), _LIBC)
end_children_with_thread(_LIBC)
