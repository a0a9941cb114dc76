"""Messages in a ring, one after the other: each a frame, then its tensors straight from and into their own memory.

A message may be longer than the ring. What finds no room waits at the sender, which goes on; whoever is told that there
is room again copies on from there. So the ring's size decides how much is under way, never what may be sent.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch

from roundelay.errors import InternalError
from roundelay.transport import frame as wire
from roundelay.transport.contract import Arrived, Message
from roundelay.transport.ring import HEAD, TAIL, WANTED, Fence, Ring

CHUNK_BYTES = 2**18
"""After so many bytes the other end is told, so that it copies out while we copy in."""


@final
class Outlet:
    """The sending end of a ring: `put` belongs to one thread, everything else to any.

    A piece that waits carries its place in the stream, and the ring's tail says how much of the stream is written: an
    exception in the middle of anything leaves nothing twice and nothing out.

    Args:
        ring: where the bytes go.
        tell: wakes the receiver if it sleeps.
    """

    def __init__(self, ring: Ring, tell: Callable[[], None]) -> None:
        self._ring, self._tell = ring, tell
        self._fence = Fence()
        self._waiting: deque[tuple[int, int, int, object]] = deque()  # start, end, address, owner of a piece
        self._copying = threading.Lock()
        self._sealed = False

    @property
    def waits(self) -> bool:
        """Whether something waits for room."""
        return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether it is worth copying on."""
        counters = self._ring.counters
        return counters[TAIL] - counters[HEAD] <= self._ring.size // 2

    def put(self, frame: bytearray, tensors: Sequence[torch.Tensor] = ()) -> bool:
        """Send a frame and the tensors that follow it; dropped once sealed.

        Returns:
            Whether something waits, so that somebody must call `flush` when there is room.
        """
        if self._copying.acquire(blocking=False):
            try:
                if self._sealed or self._put_at_once(frame, tensors):
                    return False
            finally:
                self._copying.release()
        self._append(ctypes.addressof(ctypes.c_char.from_buffer(frame)), len(frame), frame)
        for tensor in tensors:
            self._append(tensor.data_ptr(), tensor.nbytes, tensor)
        self.flush()
        return bool(self._waiting)

    def flush(self) -> None:
        """Copy in what there is room for, unless another thread is at it."""
        if self._copying.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._copying.release()

    def want_room(self, wanted: bool) -> None:
        """Ask to be told when there is room; look at `has_room` once more before waiting for it."""
        self._ring.counters[WANTED] = wanted
        self._fence()

    def seal(self, patience_s: float) -> bool:
        """Send nothing any more and drop what waits; whether no other thread is copying, so that memory may go."""
        self._sealed = True
        done = self._copying.acquire(timeout=patience_s)
        if done:
            self._waiting.clear()
            self._copying.release()
        return done

    def _put_at_once(self, frame: bytearray, tensors: Sequence[torch.Tensor]) -> bool:
        """The short way, of a short message when nothing waits: all of it is written, then told once."""
        ring, size = self._ring, len(frame)
        counters = ring.counters
        tail = counters[TAIL]
        for tensor in tensors:
            size += tensor.nbytes
        if self._waiting or size > CHUNK_BYTES or tail + size - counters[HEAD] > ring.size:
            return False
        ring.put(tail, frame)
        tail += len(frame)
        for tensor in tensors:
            ring.write(tail, tensor.data_ptr(), tensor.nbytes)
            tail += tensor.nbytes
        self._fence.order()
        counters[TAIL] = tail
        self._fence()  # the receiver says that it sleeps, then looks at the tail; we the other way round
        self._tell()
        return True

    def _append(self, address: int, count: int, owner: object) -> None:
        try:
            start = self._waiting[-1][1]
        except IndexError:  # all before it has been written
            start = self._ring.counters[TAIL]
        self._waiting.append((start, start + count, address, owner))

    def _flush(self) -> None:
        ring, counters, waiting = self._ring, self._ring.counters, self._waiting
        tail = told = counters[TAIL]
        while waiting and not self._sealed:
            start, end, address, _ = waiting[0]
            stop = min(end, counters[HEAD] + ring.size, tail + CHUNK_BYTES)
            if tail < stop:
                ring.write(tail, address + tail - start, stop - tail)
                self._fence.order()
                counters[TAIL] = tail = stop
            elif tail < end:
                break
            if tail - told >= CHUNK_BYTES:
                told = self._told(tail)
            if tail >= end:
                waiting.popleft()
        if tail > told:
            self._told(tail)

    def _told(self, tail: int) -> int:
        self._fence()  # as in `_put_at_once`
        self._tell()
        return tail


@final
class Ended:
    """The sender has closed in good order; nothing follows."""


@final
class Inlet:
    """The receiving end of a ring, for one thread.

    Args:
        source: the worker at the other end.
        ring: where the bytes come from.
        tell: wakes the sender, which waits for room.
    """

    def __init__(self, source: int, ring: Ring, tell: Callable[[], None]) -> None:
        self._source, self._ring, self._tell = source, ring, tell
        self._fence = Fence()
        self.taken = 0
        """Bytes taken so far; it grows while a long message comes in."""
        self._freed = 0  # bytes that the sender knows to be taken
        self._enough = min(CHUNK_BYTES, ring.size // 8)  # to be worth telling
        self._announced: wire.Head | None = None  # of the message that is coming in
        self._body: bytearray | None = None  # its body, if that does not fit into a frame
        self._message: Message | None = None
        self._parts: deque[tuple[int, int]] = deque()  # address and bytes of what is still to be filled

    def read(self) -> Arrived | Ended | None:
        """The next thing that has come in whole, or None.

        Raises:
            InternalError: what comes in is no message.
        """
        available = self._ring.counters[TAIL] - self.taken
        if not available:
            if self.taken != self._freed:
                self.free()
            return None
        self._fence.order()
        if self._announced is None:
            done = self._begin(available)
            if self._announced is None:
                return done
        while self._fill():
            if self._message is None:
                assert self._body is not None
                self._decode(self._announced, memoryview(self._body))
            else:
                arrived = Arrived(self._source, self._message)
                self._announced = self._body = self._message = None
                return arrived
        return None

    def free(self) -> None:
        """Give the room of what was taken back to the sender."""
        counters = self._ring.counters
        self._fence.order()
        counters[HEAD] = self._freed = self.taken
        self._fence()  # the sender says that it wants room, then looks at the head; we the other way round
        if counters[WANTED] and counters[TAIL] - self.taken <= self._ring.size // 2:
            self._tell()

    def discard(self) -> None:
        """Take all there is and forget it; the stream is of no use afterwards."""
        self.taken = self._ring.counters[TAIL]
        self.free()

    def _begin(self, available: int) -> Ended | None:
        """Read the head of what comes next, and its body if that is inside its frame."""
        if not wire.HEAD_BYTES <= available <= self._ring.size:
            if 0 <= available < wire.HEAD_BYTES:
                return None
            raise _damaged(available)
        head = wire.read_head(self._ring.view(self.taken, wire.HEAD_BYTES))
        if head.kind == wire.MESSAGE_APART:
            self._announced, self._body = head, bytearray(head.length)
            self._parts.append((ctypes.addressof(ctypes.c_char.from_buffer(self._body)), head.length))
            self._take(wire.HEAD_BYTES)
            return None
        if available < wire.HEAD_BYTES + head.length:
            return None
        if head.kind == wire.MESSAGE:
            self._announced = head
            self._decode(head, self._ring.view(self.taken + wire.HEAD_BYTES, head.length))
        self._take(wire.HEAD_BYTES + head.length)
        if head.kind == wire.MESSAGE:
            return None
        if head.kind != wire.END:
            raise InternalError(
                "a frame in a ring", got=str(head), expected="a message or an end", remedy="Report this."
            )
        return Ended()

    def _decode(self, head: wire.Head, body: memoryview) -> None:
        self._message, apart = wire.decode(head, body)
        for tensor in apart:
            self._parts.append((tensor.data_ptr(), tensor.nbytes))

    def _fill(self) -> bool:
        """Copy out what has come of the parts; whether nothing is missing."""
        parts, ring = self._parts, self._ring
        while parts:
            available = ring.counters[TAIL] - self.taken
            if not 0 < available <= ring.size:
                if available:
                    raise _damaged(available)
                return False
            self._fence.order()
            address, missing = parts[0]
            count = min(missing, available, CHUNK_BYTES)
            ring.read(self.taken, address, count)
            if count == missing:
                parts.popleft()
            else:
                parts[0] = (address + count, missing - count)
            self._take(count)
        return True

    def _take(self, count: int) -> None:
        self.taken += count
        if self.taken - self._freed >= self._enough:
            self.free()


def _damaged(available: int) -> InternalError:
    return InternalError(
        "ring between two workers",
        got=f"{available} bytes in it",
        expected="no more than its size",
        remedy="See whether a worker writes outside its own memory.",
    )
