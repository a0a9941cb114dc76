"""What the processes of one run share for the `shm` transport, all of it created before they fork.

Nothing here has a name in any file system: the fork inherits memory, pipes and eventfds, and the kernel frees them when
the last process that holds them ends, however it ends. So nothing can leak.

- A *pipe* per ordered pair of workers carries the frames. Only one worker holds its writing end: when that worker ends,
  even by SIGKILL, the pipe ends after the last byte written.
- A *ring* per ordered pair carries the tensors that are too long for a frame.
- *Shared tensors*: for each exchange, memory that its holders read and write in turns, as their messages say.
- The *abort reasons* are shared memory in which a worker that aborts writes why.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import struct
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import final

import torch

from roundelay.errors import InternalError, PlanError
from roundelay.transport.wire_format import MAX_REASON_BYTES

PIPE_BYTES = 2**18
"""Capacity of a pipe, where the system allows it; four times the default."""

RING_BYTES = 2**22
"""Capacity of a ring; a sender keeps what exceeds it in its own memory."""

MIN_RING_BYTES = 2**16

_LENGTH = struct.Struct("<I")


@final
class EventFd:
    """A counter in the kernel (eventfd) whose owner can wait for it with poll; adding to it never waits."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, count: int = 1) -> None:
        """Add to the counter, which wakes the owner."""
        os.eventfd_write(self.fd, count)

    def take(self) -> int:
        """Return the counter and reset it to 0."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Close the file descriptor; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@final
class Pipe:
    """A pipe whose ends never block."""

    __slots__ = ("reading", "writing")

    def __init__(self) -> None:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.reading, self.writing = io.FileIO(reading), io.FileIO(writing, "w")
        with contextlib.suppress(PermissionError):  # over the user's limit for pipes: keep the default size
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


@final
class Ring:
    """Shared memory for bytes in transit from one worker to another. One writes, one reads; neither waits here.

    Positions count all bytes that ever pass through the ring. A frame in the pipe says how many were written, and the
    eventfd `freed` counts those that were read: so system calls order the memory accesses of the two processes.

    Args:
        size: capacity in bytes, a power of two of at least 64 KiB.
    """

    __slots__ = ("_base", "_data", "_map", "_pin", "freed", "size")

    def __init__(self, size: int = RING_BYTES) -> None:
        if size < MIN_RING_BYTES or size & (size - 1):
            raise InternalError(
                "ring between two workers", got=f"{size} bytes", expected="a power of two", remedy="Report this."
            )
        self.size = size
        self.freed = EventFd()
        self._map: mmap.mmap | None = _shared_memory(size)
        self._data = memoryview(self._map)
        self._pin: ctypes.c_char | None = ctypes.c_char.from_buffer(self._data)
        self._base = ctypes.addressof(self._pin)

    def write(self, position: int, address: int, count: int) -> None:
        """Copy `count` bytes at `address` to `position`."""
        at = position & (self.size - 1)
        first = min(count, self.size - at)
        ctypes.memmove(self._base + at, address, first)
        if first < count:
            ctypes.memmove(self._base, address + first, count - first)

    def read(self, position: int, address: int, count: int) -> None:
        """Copy `count` bytes at `position` to `address`."""
        at = position & (self.size - 1)
        first = min(count, self.size - at)
        ctypes.memmove(address, self._base + at, first)
        if first < count:
            ctypes.memmove(address + first, self._base, count - first)

    def close(self) -> None:
        """Unmap the memory in this process; a second call does nothing."""
        if self._map is not None:
            self._pin = None
            self._data.release()
            self._map.close()
            self._map = None
            self.freed.close()


@final
class AbortReasons:
    """Shared memory with one text for each worker: why it aborted. It is written before the worker's pipes end."""

    _BYTES = _LENGTH.size + MAX_REASON_BYTES

    def __init__(self, num_workers: int) -> None:
        self._map = _shared_memory(num_workers * self._BYTES)

    def write(self, worker: int, reason: str) -> None:
        """Set the reason of this process's `worker`, cut to `MAX_REASON_BYTES`."""
        text = reason.encode()[:MAX_REASON_BYTES]
        start = worker * self._BYTES
        self._map[start : start + _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text

    def read(self, worker: int) -> str:
        """Return the reason of a worker whose pipe has ended; empty if it did not abort."""
        start = worker * self._BYTES
        (length,) = _LENGTH.unpack_from(self._map, start)
        text = self._map[start + _LENGTH.size : start + _LENGTH.size + min(length, MAX_REASON_BYTES)]
        return text.decode(errors="replace")

    def close(self) -> None:
        """Unmap the memory in this process; a second call does nothing."""
        self._map.close()


@final
class ShmResources:
    """Everything that the workers of one run share.

    The launcher creates it before it forks. A child calls `keep_only`; the launcher calls `close` when all children are
    forked, since a pipe that it holds open does not end with its writer.

    Args:
        num_workers: how many processes there will be.
        ring_bytes: capacity of each ring, a power of two.
        shared: bytes of the memory that holders of a stage share, by channel.

    Raises:
        PlanError: this system does not have enough open files or memory.
    """

    def __init__(
        self, num_workers: int, ring_bytes: int = RING_BYTES, shared: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        if not (hasattr(os, "eventfd") and hasattr(os, "pipe2")):
            raise _unavailable("no eventfd or pipe2")
        self.num_workers = num_workers
        self.reasons = AbortReasons(num_workers)
        self.shared: dict[int, torch.Tensor] = {}
        #: by sender and receiver, as in `rings`
        self.pipes: dict[tuple[int, int], Pipe] = {}
        self.rings: dict[tuple[int, int], Ring] = {}
        try:
            for worker in range(num_workers):
                for other in range(num_workers):
                    if other != worker:
                        self.pipes[worker, other] = Pipe()
                        self.rings[worker, other] = Ring(ring_bytes)
            #: as bytes, by channel; unmapped when no tensor refers to it any more
            self.shared = {
                channel: torch.frombuffer(_shared_memory(size), dtype=torch.uint8) for channel, size in shared.items()
            }
        except OSError as fault:
            self.close()
            raise _unavailable(str(fault)) from fault

    def keep_only(self, worker: int) -> None:
        """Close what `worker`, which this process is, does not use.

        A process that the worker forks itself, for example of a data loader, would hold its pipes open after its death;
        so it closes them first of all.
        """
        for (source, target), pipe in self.pipes.items():
            if source != worker:
                pipe.writing.close()
            if target != worker:
                pipe.reading.close()
        for pair in [pair for pair in self.rings if worker not in pair]:
            self.rings.pop(pair).close()
        this = weakref.ref(self)  # the hook cannot be removed

        def after_fork() -> None:
            resources = this()
            if resources is not None:
                resources.close_pipes()

        os.register_at_fork(after_in_child=after_fork)

    def stop_reading(self) -> None:
        """Close the reading ends of all pipes in this process; a second call does nothing."""
        for pipe in self.pipes.values():
            pipe.reading.close()

    def close_pipes(self) -> None:
        """Close the ends of all pipes in this process; a second call does nothing."""
        for pipe in self.pipes.values():
            pipe.reading.close()
            pipe.writing.close()

    def close(self) -> None:
        """Close everything in this process; a second call does nothing."""
        self.close_pipes()
        for ring in self.rings.values():
            ring.close()
        self.shared.clear()
        self.reasons.close()


def _shared_memory(size: int) -> mmap.mmap:
    """Zeroed memory shared with forked children; pages are allocated when first touched."""
    return mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)


def _unavailable(got: str) -> PlanError:
    return PlanError(
        "transport 'shm'",
        got=got,
        expected="a Linux with room for six open files and a few MiB of shared memory for each pair of workers",
        remedy='Use transport = "gloo", fewer workers, or raise the limit (`ulimit -n`).',
    )
