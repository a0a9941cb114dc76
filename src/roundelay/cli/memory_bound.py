"""Bounds what a process may allocate while it works for a run of somebody else's."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roundelay.errors import RunError
from roundelay.ir.num_bytes import bytes_text

ROOM_BYTES = 2**30
"""For stacks of threads, gRPC and messages, beside what the machine's part needs."""

_STATUS = Path("/proc/self/status")


@contextmanager
def bounded_memory(limit: int) -> Iterator[None]:
    """Within the context the process may allocate so many bytes more, and some room; where the system can do that.

    Raises:
        RunError: that was not enough.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if (used := _used()) is not None:
        allowed = [used + limit + ROOM_BYTES, *(known for known in before if known != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(allowed), before[1]))
    try:
        yield
    except MemoryError as error:
        raise RunError(
            "memory of this machine",
            got=f"more than the {bytes_text(limit)} of --memory-limit, and {bytes_text(ROOM_BYTES)} of room",
            expected="what the plan says that its part needs",
            remedy="Give a larger --memory-limit if you trust this host, and have the memory.",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _used() -> int | None:
    """Bytes of data that this process has now; None where the system does not say."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:")), None)
