"""Bytes on their way from one process to another, in memory that both share: one writes, one reads, neither waits here.

How much has been written the reader is told by other means (`stream.py`), which also order memory between the two. How
much has been taken is the *head*, a counter that only grows, the reader's to set: eight aligned bytes, stored and
loaded by a single machine instruction, so a process that is killed leaves either the old number or the new one.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
from collections.abc import Callable
from typing import final

from roundelay.errors import InternalError

RING_BYTES = 2**22
"""Room of a ring: as much as two workers can have under way before the sender has to keep the rest itself."""

LEAST_BYTES = 2**16

HEAD, WANTED = 0, 16
"""Places of the head, and of the writer's flag that it waits for room. Two cache lines lie between any two numbers of
different owners, as processors fetch lines in pairs."""

FIRST_FREE = 32
"""What lies behind is for whoever has the ring (`credits.py`)."""

_COUNTERS_BYTES = mmap.PAGESIZE


@final
class Ring:
    """The shared memory of one pair, made before the processes fork: it has no name, so nothing of it can be left over.

    Args:
        size: room in bytes, a power of two of at least 64 KiB.
    """

    __slots__ = ("_base", "_data", "_map", "_pin", "counters", "size")

    def __init__(self, size: int = RING_BYTES) -> None:
        if size < LEAST_BYTES or size & (size - 1):
            raise InternalError(
                "ring between two workers", got=f"{size} bytes", expected="a power of two", remedy="Report this."
            )
        self.size = size
        self._map: mmap.mmap | None = shared_memory(_COUNTERS_BYTES + size)
        self.counters = memoryview(self._map)[:_COUNTERS_BYTES].cast("Q")
        """The shared numbers, at `WANTED` the writer's to set, at `HEAD` the reader's."""
        self._data = memoryview(self._map)[_COUNTERS_BYTES:]
        self._pin: ctypes.c_char | None = ctypes.c_char.from_buffer(self._data)
        self._base = ctypes.addressof(self._pin)

    def write(self, position: int, address: int, count: int) -> None:
        """Copy `count` bytes at `address` into the ring, as the bytes number `position` and following."""
        at = position & (self.size - 1)
        first = min(count, self.size - at)
        ctypes.memmove(self._base + at, address, first)
        if first < count:
            ctypes.memmove(self._base, address + first, count - first)

    def read(self, position: int, address: int, count: int) -> None:
        """Copy the bytes number `position` and following, `count` of them, to `address`."""
        at = position & (self.size - 1)
        first = min(count, self.size - at)
        ctypes.memmove(address, self._base + at, first)
        if first < count:
            ctypes.memmove(address + first, self._base, count - first)

    def close(self) -> None:
        """Give this process's hold on the memory back; a second call does nothing."""
        if self._map is not None:
            self._pin = None
            self.counters.release()
            self._data.release()
            self._map.close()
            self._map = None


@final
class Fence:
    """Keeps what was loaded and stored before it before what is loaded and stored after it, on any processor.

    Python has no memory fence. Giving a lock back orders what came before, taking one orders what comes after, and a
    lock taken after another was given back is ordered behind it; so twice through a lock that nobody else uses. On
    x86-64 each of these is a locked instruction, a whole fence by itself, and once is enough.
    """

    __slots__ = ("_give", "_take", "order")

    def __init__(self) -> None:
        lock = threading.Lock()
        self._take, self._give = lock.acquire, lock.release
        self.order: Callable[[], None] = _nothing if _ORDERED else self
        """The same, but stores may be seen later than loads that follow them; costs nothing where that is the rule."""

    def __call__(self) -> None:
        """Pass the fence."""
        self._take()
        self._give()
        if not _ORDERED:
            self._take()
            self._give()


_ORDERED = platform.machine() in ("x86_64", "AMD64")  # these let no store pass a store, no load a load, no store a load


def _nothing() -> None:
    """What `Fence.order` has to do on such a machine."""


def shared_memory(size: int) -> mmap.mmap:
    """Zeroed memory that the children of this process will share; pages take room when they are first touched."""
    return mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
