"""What the processes of one run share to talk through memory, all of it made before they fork.

Nothing here has a name in any file system. Memory, bells and lifelines are inherited by the fork, and the kernel takes
them back when the last process that holds them ends, however it ends: there is nothing to leak.

- A *ring* for each ordered pair of workers carries the bytes.
- Two *bells* for each worker wake it: one when something has come for it, one when a ring has room again.
- A *lifeline* for each worker is a pipe that this worker alone holds the writing end of, and in which nothing is ever
  written: when it ends, by SIGKILL too, every other worker sees the pipe end at once.
- The *board* is a page for each worker: whether it sleeps, so that nobody rings a bell for a worker that is awake, and
  the last words of one that gave up.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from typing import final

from roundelay.errors import PlanError
from roundelay.transport.frame import MAX_REASON_BYTES
from roundelay.transport.ring import RING_BYTES, Ring, shared_memory

_ASLEEP, _WORDS = 0, 128  # places on a worker's part of the board
_PART_BYTES = 4096 + MAX_REASON_BYTES
_LENGTH = struct.Struct("<I")

AWAKE, MESSAGES, MESSAGES_AND_CREDITS = range(3)
"""What a worker's bell is to be rung for: nothing, as it looks itself; messages and ends; credits, too."""


@final
class Bell:
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
class Lifeline:
    """A pipe that shows that a worker lives: its writing end closes when the worker ends.

    A process that the worker forks, say of a data loader, would hold that end open beyond the worker's death. So the
    worker's own children close it first of all.
    """

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()

    def hold(self) -> None:
        """Be the worker that this lifeline stands for."""
        os.close(self.reading)
        self.reading = -1
        line = weakref.ref(self)  # the hook itself stays as long as the process

        def forget() -> None:
            held = line()
            if held is not None:
                held.release()

        os.register_at_fork(after_in_child=forget)

    def release(self) -> None:
        """Let go of the writing end; a second call does nothing."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def close(self) -> None:
        """Let go of both ends; a second call does nothing."""
        self.release()
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1


@final
class Board:
    """A part for each worker, written by that worker and read by all."""

    def __init__(self, num_workers: int) -> None:
        self._map = shared_memory(num_workers * _PART_BYTES)

    def asleep(self, worker: int) -> int:
        """What `worker` wants its bell to be rung for: AWAKE, MESSAGES or MESSAGES_AND_CREDITS."""
        return self._map[worker * _PART_BYTES + _ASLEEP]

    def sleep(self, worker: int, wanted: int) -> None:
        """The worker's own: say what it is about to wait for, or that it is AWAKE."""
        self._map[worker * _PART_BYTES + _ASLEEP] = wanted

    def leave_words(self, worker: int, reason: str) -> None:
        """The worker's own: why it gave up, cut to `MAX_REASON_BYTES`; before its lifeline ends."""
        words = reason.encode()[:MAX_REASON_BYTES]
        start = worker * _PART_BYTES + _WORDS
        self._map[start : start + _LENGTH.size + len(words)] = _LENGTH.pack(len(words)) + words

    def last_words(self, worker: int) -> str:
        """Why `worker` gave up; empty if it said nothing. After its lifeline has ended."""
        start = worker * _PART_BYTES + _WORDS
        (length,) = _LENGTH.unpack_from(self._map, start)
        body = self._map[start + _LENGTH.size : start + _LENGTH.size + min(length, MAX_REASON_BYTES)]
        return body.decode(errors="replace")

    def close(self) -> None:
        """Give this process's hold back; a second call does nothing."""
        self._map.close()


@final
class Wiring:
    """Everything that the workers of one run share.

    Made by the launcher before it forks; in a child, `keep` closes what is not its own; the launcher calls `close`
    when all children are forked, for as long as it holds a lifeline nobody sees its worker end.

    Args:
        num_workers: how many processes there will be.
        ring_bytes: room of each ring, a power of two.

    Raises:
        PlanError: this system does not have what it takes.
    """

    def __init__(self, num_workers: int, ring_bytes: int = RING_BYTES) -> None:
        if not hasattr(os, "eventfd"):
            raise _unable("no eventfd")
        self.num_workers = num_workers
        self.board = Board(num_workers)
        self.rings: dict[tuple[int, int], Ring] = {}
        self.arrived: list[Bell] = []
        self.freed: list[Bell] = []
        self.lifelines: list[Lifeline] = []
        try:
            for worker in range(num_workers):
                self.arrived.append(Bell())
                self.freed.append(Bell())
                self.lifelines.append(Lifeline())
                for other in range(num_workers):
                    if other != worker:
                        self.rings[worker, other] = Ring(ring_bytes)
        except OSError as fault:
            self.close()
            raise _unable(str(fault)) from fault

    def keep(self, worker: int) -> None:
        """Be `worker`: hold its lifeline, and close the rings and lifelines of others that are none of its business."""
        self.lifelines[worker].hold()
        for other, lifeline in enumerate(self.lifelines):
            if other != worker:
                lifeline.release()
        for pair in [pair for pair in self.rings if worker not in pair]:
            self.rings.pop(pair).close()

    def close(self) -> None:
        """Close all that this process holds; a second call does nothing."""
        for line in self.lifelines:
            line.close()
        for bell in (*self.arrived, *self.freed):
            bell.close()
        for ring in self.rings.values():
            ring.close()
        self.board.close()


def open_pairs(num_workers: int, ring_bytes: int = RING_BYTES) -> Wiring:
    """What `num_workers` processes need to talk through memory, for the launcher to make before it forks them."""
    return Wiring(num_workers, ring_bytes)


def _unable(got: str) -> PlanError:
    return PlanError(
        "transport 'shm'",
        got=got,
        expected="a Linux with room for a few files and a few MiB of shared memory for each pair of workers",
        remedy='Use transport = "gloo", fewer workers, or raise the limit (`ulimit -n`).',
    )
