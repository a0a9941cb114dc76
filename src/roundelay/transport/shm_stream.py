"""Messages from one process to another: frames in a pipe, and in a ring beside it tensors too long for a frame.

The pipe says everything, in order: a frame is a message, or tells that so many bytes more lie in the ring. So the
kernel orders memory, and wakes whoever waits. What finds no room waits at the sender, which goes on; whoever is told
that there is room again copies on from there. The sizes of pipe and ring decide how much is under way, never what may
be sent.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import Arrived, Delivery, Message
from roundelay.transport.shm_ring import HEAD, WANTED, Fence, Ring

CHUNK_BYTES = 2**18
"""After so many bytes the other end is told, so that it copies out while we copy in."""

READ_BYTES = 2**16
"""Most that is read from a pipe at once: as much as an ordinary one holds."""


class _Payload(NamedTuple):
    """Memory that is to be copied, and its place among all the bytes that ever pass through the ring."""

    start: int
    end: int
    address: int
    owner: object


@final
class FrameWriter:
    """The sending end: `put` belongs to one thread, everything else to any.

    What waits carries its place in the ring's stream, and a count says how much of that is written: an exception in the
    middle of a copy leaves nothing twice and nothing out.

    Args:
        pipe: file descriptor of the writing end, which never blocks.
        ring: beside the pipe.
    """

    def __init__(self, pipe: int, ring: Ring) -> None:
        self.pipe, self._ring = pipe, ring
        self.full = False
        """Whether what waits, waits for room in the pipe."""
        self._fence = Fence()
        self._waiting: deque[bytearray | _Payload] = deque()
        self._copying = threading.Lock()
        self._given = self._tail = self._told = 0  # bytes of the ring's stream: to be sent, written, told of
        self._sealed = False

    @property
    def waits(self) -> bool:
        """Whether something waits for room."""
        return bool(self._waiting) and not self._sealed

    @property
    def has_room(self) -> bool:
        """Whether it is worth copying on."""
        return not self.full and self._tail - self._ring.counters[HEAD] <= self._ring.size // 2

    def put(self, frame: bytearray, tensors: Sequence[torch.Tensor] = ()) -> bool:
        """Send a frame, which from now on is ours, and the tensors that belong to it; dropped once sealed.

        Returns:
            Whether something waits, so that somebody must call `flush` when there is room.
        """
        if self._copying.acquire(blocking=False):
            try:
                if self._sealed:
                    return False
                if not self._waiting and (not tensors or self._copy_at_once(frame, tensors)):
                    return not self._post(frame)
            finally:
                self._copying.release()
        self._waiting.append(frame)
        for tensor in tensors:
            start, self._given = self._given, self._given + tensor.nbytes
            self._waiting.append(_Payload(start, self._given, tensor.data_ptr(), tensor))
        self.flush()
        return self.waits

    def flush(self) -> None:
        """Copy in what there is room for, unless another thread is at it."""
        if self._copying.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._copying.release()

    def want_room(self, wanted: bool) -> None:
        """Ask to be told when the ring has room; look at `has_room` once more before waiting for it."""
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

    def _copy_at_once(self, frame: bytearray, tensors: Sequence[torch.Tensor]) -> bool:
        """Copy short tensors in before their frame is written, which then tells of them; whether there is room."""
        ring, tail = self._ring, self._tail
        size = sum([tensor.nbytes for tensor in tensors])
        if size > CHUNK_BYTES or tail + size - ring.counters[HEAD] > ring.size:
            return False
        for tensor in tensors:
            ring.write(tail, tensor.data_ptr(), tensor.nbytes)
            tail += tensor.nbytes
        frame += wire.more_frame(tail - self._told)
        self._given = self._tail = self._told = tail
        return True

    def _post(self, frame: bytearray) -> bool:
        """Write a frame; what finds no room is kept, to be the first of all that waits. Whether nothing is."""
        try:
            count = os.write(self.pipe, frame)
        except BlockingIOError:
            count = 0
        except BrokenPipeError:  # nobody reads any more
            self._sealed = True
            return True
        if count == len(frame):
            return True
        self._waiting.appendleft(frame[count:])
        self.full = True
        return False

    def _flush(self) -> None:
        waiting = self._waiting
        self.full = False
        while waiting and not self._sealed:
            first = waiting[0]
            if isinstance(first, _Payload):
                moved = self._copy(first)
                if self._tail == first.end:
                    waiting.popleft()
                elif not moved:
                    break
                if self._tail - self._told < CHUNK_BYTES:
                    continue
            elif self._told == self._tail:
                waiting.popleft()
                if self._post(first):
                    continue
                return
            if not self._tell():
                return
        if self._told < self._tail:
            self._tell()

    def _copy(self, piece: _Payload) -> bool:
        """Copy in what there is room for, up to a chunk; whether there is any."""
        tail = self._tail
        stop = min(piece.end, self._ring.counters[HEAD] + self._ring.size, tail + CHUNK_BYTES)
        if stop > tail:
            self._ring.write(tail, piece.address + tail - piece.start, stop - tail)
            self._tail = stop
        return stop > tail

    def _tell(self) -> bool:
        """Tell what lies in the ring; whether the pipe had room."""
        told, self._told = self._told, self._tail
        return self._post(wire.more_frame(self._tail - told))


@final
class FrameReader:
    """The receiving end, for one thread.

    Args:
        source: the worker at the other end.
        pipe: file descriptor of the reading end, which never blocks.
        ring: beside the pipe.
        tell: wakes the sender, which waits for room in the ring.
    """

    def __init__(self, source: int, pipe: int, ring: Ring, tell: Callable[[], None]) -> None:
        self.pipe = pipe
        self.ended = False
        """Whether the sender has closed in good order; nothing follows."""
        self._source, self._ring, self._tell = source, ring, tell
        self._fence = Fence()
        self._rest = b""  # the beginning of a frame
        self._taken = 0  # bytes of the ring's stream
        self._announced: wire.Head | None = None  # of the message whose body or tensors come through the ring
        self._body: bytearray | None = None  # its body, if that does not fit into a frame
        self._message: Message | None = None
        self._parts: deque[tuple[int, int]] = deque()  # address and bytes of what is still to be filled

    def read(self, come: deque[Delivery]) -> bool:
        """Take what lies in the pipe and append the messages that are whole to `come`; whether more may follow.

        Raises:
            InternalError: what comes in is no message.
        """
        try:
            data = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while at + wire.HEAD_BYTES <= end:
            body = at + wire.HEAD_BYTES
            head = wire.head_of(data[at:body])
            stop = body + head.length if head.kind != wire.MESSAGE_APART else body
            if stop > end:
                break
            if head.kind == wire.MESSAGE and self._announced is None:
                message, apart = wire.decode(head, data, body)
                if apart:
                    self._announced = head
                    self._await(message, apart)
                else:
                    come.append(Arrived(self._source, message))
            elif not self._take(head, data, body, come):
                return False
            at = stop
        self._rest = data[at:]
        return True

    def _take(self, head: wire.Head, data: bytes, at: int, come: deque[Delivery]) -> bool:
        """Take a frame that is not a message of its own, its body beginning at `at`; whether more may follow."""
        if head.kind == wire.MORE:
            self._fill(wire.more_of(head, data, at), come)
        elif self._announced is not None:
            raise wire.unexpected(head)
        elif head.kind == wire.MESSAGE_APART:
            self._announced, self._body = head, bytearray(head.length)
            self._parts.append((ctypes.addressof(ctypes.c_char.from_buffer(self._body)), head.length))
        elif head.kind == wire.END:
            self.ended = True
            return False
        elif head.kind != wire.STIR:
            raise wire.unexpected(head)
        return True

    def _await(self, message: Message, apart: Sequence[torch.Tensor]) -> None:
        self._message = message
        self._parts.extend([(tensor.data_ptr(), tensor.nbytes) for tensor in apart])

    def _fill(self, count: int, come: deque[Delivery]) -> None:
        """Copy out `count` bytes that have come through the ring."""
        parts, ring = self._parts, self._ring
        if count > ring.size:
            raise _damaged(count)
        while count:
            if not parts:
                raise _damaged(count)
            address, missing = parts[0]
            step = min(count, missing, CHUNK_BYTES)
            ring.read(self._taken, address, step)
            if step == missing:
                parts.popleft()
            else:
                parts[0] = (address + step, missing - step)
            self._taken += step
            count -= step
            self._free()
            if not parts:
                self._complete(come)

    def _complete(self, come: deque[Delivery]) -> None:
        """All that was awaited has come: the body, or the message."""
        assert self._announced is not None
        if self._message is None:
            assert self._body is not None
            self._await(*wire.decode(self._announced, self._body))
        if self._message is not None and not self._parts:
            come.append(Arrived(self._source, self._message))
            self._announced = self._body = self._message = None

    def _free(self) -> None:
        """Give the room of what was taken back to the sender."""
        counters = self._ring.counters
        self._fence.order()
        counters[HEAD] = self._taken
        self._fence()  # the sender says that it wants room, then looks at the head; we the other way round
        if counters[WANTED]:
            self._tell()


def _damaged(count: int) -> InternalError:
    return InternalError(
        "ring between two workers",
        got=f"{count} bytes announced",
        expected="no more than its size, and than the tensors announced before",
        remedy="See whether a worker writes outside its own memory.",
    )
