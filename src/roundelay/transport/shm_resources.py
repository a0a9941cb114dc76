"""What the processes of one run share to talk to each other, all of it made before they fork.

Nothing here has a name in any file system. Memory, pipes and bells are inherited by the fork, and the kernel takes them
back when the last process that holds them ends, however it ends: there is nothing to leak.

- A *pipe* for each ordered pair of workers carries the frames. Its writing end belongs to one worker alone: when that
  worker ends, by SIGKILL too, the pipe ends behind the last byte that it wrote.
- A *ring* for each ordered pair carries the tensors that are too long for a frame.
- Two *bells* for each worker wake its threads: one when a ring has room again, one when it has ended itself.
- The *board* is a page for each worker: whether it waits for a credit, and the last words of one that gave up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import weakref
from typing import final

from roundelay.errors import PlanError
from roundelay.transport.shm_ring import RING_BYTES, Ring, shared_memory
from roundelay.transport.wire_format import MAX_REASON_BYTES

PIPE_BYTES = 2**18
"""Room of a pipe, where the system allows it; four times what is usual."""

_WANTS, _WORDS = 0, 128  # places on a worker's part of the board
_PART_BYTES = 4096 + MAX_REASON_BYTES
_LENGTH = struct.Struct("<I")


@final
class EventFd:
    """An eventfd: whoever rings it wakes the one that waits for it; ringing never waits and many rings are as one."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Wake the owner, now or when it next waits."""
        os.eventfd_write(self.fd, 1)

    def still(self) -> None:
        """The owner's: forget the rings so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close this process's hold; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@final
class Pipe:
    """A pipe of the kernel's; neither end ever blocks."""

    __slots__ = ("reading", "writing")

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(
            PermissionError
        ):  # the person's share of such memory is used up: an ordinary pipe does
            fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close_reading(self) -> None:
        """Close this process's hold on the reading end; a second call does nothing."""
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1

    def close_writing(self) -> None:
        """Close this process's hold on the writing end; a second call does nothing."""
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1


@final
class StatusPage:
    """A part for each worker, written by that worker and read by all."""

    def __init__(self, num_workers: int) -> None:
        self._map = shared_memory(num_workers * _PART_BYTES)

    def wants_credit(self, worker: int) -> int:
        """Whether `worker` sleeps, or is about to, and is to be woken for a credit: 1 or 0."""
        return self._map[worker * _PART_BYTES + _WANTS]

    def want_credit(self, worker: int, wanted: bool) -> None:
        """The worker's own: whether it is to be woken for a credit."""
        self._map[worker * _PART_BYTES + _WANTS] = wanted

    def leave_words(self, worker: int, reason: str) -> None:
        """The worker's own: why it gave up, cut to `MAX_REASON_BYTES`; before its pipes end."""
        words = reason.encode()[:MAX_REASON_BYTES]
        start = worker * _PART_BYTES + _WORDS
        self._map[start : start + _LENGTH.size + len(words)] = _LENGTH.pack(len(words)) + words

    def last_words(self, worker: int) -> str:
        """Why `worker` gave up; empty if it said nothing. After its pipe has ended."""
        start = worker * _PART_BYTES + _WORDS
        (length,) = _LENGTH.unpack_from(self._map, start)
        body = self._map[start + _LENGTH.size : start + _LENGTH.size + min(length, MAX_REASON_BYTES)]
        return body.decode(errors="replace")

    def close(self) -> None:
        """Give this process's hold back; a second call does nothing."""
        self._map.close()


@final
class ShmResources:
    """Everything that the workers of one run share.

    Made by the launcher before it forks; in a child, `keep` closes what is not its own; the launcher calls `close`
    when all children are forked, for as long as it holds a pipe nobody sees its writer end.

    Args:
        num_workers: how many processes there will be.
        ring_bytes: room of each ring, a power of two.

    Raises:
        PlanError: this system does not have what it takes.
    """

    def __init__(self, num_workers: int, ring_bytes: int = RING_BYTES) -> None:
        if not (hasattr(os, "eventfd") and hasattr(os, "pipe2")):
            raise _unable("no eventfd or pipe2")
        self.num_workers = num_workers
        self.board = StatusPage(num_workers)
        #: from and to, as in `rings`
        self.pipes: dict[tuple[int, int], Pipe] = {}
        self.rings: dict[tuple[int, int], Ring] = {}
        self.freed: list[EventFd] = []
        self.ended: list[EventFd] = []
        try:
            for worker in range(num_workers):
                self.freed.append(EventFd())
                self.ended.append(EventFd())
                for other in range(num_workers):
                    if other != worker:
                        self.pipes[worker, other] = Pipe()
                        self.rings[worker, other] = Ring(ring_bytes)
        except OSError as fault:
            self.close()
            raise _unable(str(fault)) from fault

    def keep(self, worker: int) -> None:
        """Be `worker`: close the ends of pipes, and the rings, that are none of its business.

        A process that the worker forks, say of a data loader, would hold its pipes open beyond its death. So the
        worker's own children close them first of all.
        """
        for (source, target), pipe in self.pipes.items():
            if source != worker:
                pipe.close_writing()
            if target != worker:
                pipe.close_reading()
        for pair in [pair for pair in self.rings if worker not in pair]:
            self.rings.pop(pair).close()
        mine = weakref.ref(self)  # the hook itself stays as long as the process

        def forget() -> None:
            wiring = mine()
            if wiring is not None:
                wiring.cut()

        os.register_at_fork(after_in_child=forget)

    def stop_reading(self) -> None:
        """Close this process's reading ends of all pipes; a second call does nothing."""
        for pipe in self.pipes.values():
            pipe.close_reading()

    def cut(self) -> None:
        """Close this process's ends of all pipes; a second call does nothing."""
        for pipe in self.pipes.values():
            pipe.close_reading()
            pipe.close_writing()

    def close(self) -> None:
        """Close all that this process holds; a second call does nothing."""
        self.cut()
        for bell in (*self.freed, *self.ended):
            bell.close()
        for ring in self.rings.values():
            ring.close()
        self.board.close()


def open_pairs(num_workers: int, ring_bytes: int = RING_BYTES) -> ShmResources:
    """What `num_workers` processes need to talk to each other, for the launcher to make before it forks them."""
    return ShmResources(num_workers, ring_bytes)


def _unable(got: str) -> PlanError:
    return PlanError(
        "transport 'shm'",
        got=got,
        expected="a Linux with room for four open files and a few MiB of shared memory for each pair of workers",
        remedy='Use transport = "gloo", fewer workers, or raise the limit (`ulimit -n`).',
    )
