"""The two ends of a link of the `shm` transport: frames in a pipe, and tensors too long for a frame in a ring.

The pipe carries everything in order: a frame is a message, a credit, or says that so many more bytes are in the ring.
The kernel thereby orders memory accesses and wakes the receiver. What does not fit stays in the sender's memory while
its worker continues; `FrameWriter.flush` copies on when there is room. The capacities of pipe and ring limit how much
is in transit, never what may be sent.
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
from roundelay.transport.endpoint import Arrived, Delivery, Granted, Message
from roundelay.transport.shm_resources import Ring

CHUNK_BYTES = 2**18
"""The receiver is notified after so many bytes, so that it copies out while the sender copies in."""

READ_BYTES = 2**16
"""Most bytes that are read from a pipe at once: the default capacity of a pipe."""


class _Payload(NamedTuple):
    """Memory to copy into the ring, from position `start` to `end`."""

    start: int
    end: int
    address: int
    owner: object


@final
class FrameWriter:
    """The sending end: `put` is called by one thread, everything else by any.

    Each waiting payload has its positions in the ring, and a counter says what is written: an exception in the middle
    of a copy neither loses nor duplicates bytes.

    Args:
        pipe: file descriptor of the writing end, which never blocks.
        ring: carries the tensors.
    """

    def __init__(self, pipe: int, ring: Ring) -> None:
        self.pipe, self._ring = pipe, ring
        self.pipe_full = False
        """Whether `flush` stopped for want of room in the pipe, not in the ring."""
        self._waiting: deque[bytearray | _Payload] = deque()
        self._copying = threading.Lock()
        self._queued = self._written = self._announced = self._freed = 0  # positions in the ring
        self._sealed = False

    @property
    def waits(self) -> bool:
        """Whether something waits for room."""
        return bool(self._waiting) and not self._sealed

    @property
    def room_fd(self) -> int:
        """File descriptor that is readable when the ring has more room."""
        return self._ring.freed.fd

    def put(self, frame: bytearray, tensors: Sequence[torch.Tensor] = ()) -> bool:
        """Send a frame, which must not be changed afterwards, and its tensors; drop them if sealed.

        Returns:
            Whether something waits, so that `flush` must be called when there is room.
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
            start, self._queued = self._queued, self._queued + tensor.nbytes
            self._waiting.append(_Payload(start, self._queued, tensor.data_ptr(), tensor))
        self.flush()
        return self.waits

    def flush(self) -> None:
        """Send what there is room for, unless another thread is sending."""
        if self._copying.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._copying.release()

    def seal(self, timeout_s: float) -> bool:
        """Drop what waits and what is put from now on; return whether no other thread is copying any more."""
        self._sealed = True
        idle = self._copying.acquire(timeout=timeout_s)
        if idle:
            self._waiting.clear()
            self._copying.release()
        return idle

    def _copy_at_once(self, frame: bytearray, tensors: Sequence[torch.Tensor]) -> bool:
        """If there is room, copy short tensors before their frame is sent, and announce them in the same write."""
        at, size = self._written, sum([tensor.nbytes for tensor in tensors])
        if size > CHUNK_BYTES or self._room(size) < size:
            return False
        for tensor in tensors:
            self._ring.write(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        frame += wire.more_frame(at - self._announced)
        self._queued = self._written = self._announced = at
        return True

    def _room(self, wanted: int) -> int:
        """How many bytes the ring has room for; asks the kernel only if fewer than `wanted` are known of."""
        room = self._freed + self._ring.size - self._written
        if room < wanted:
            freed = self._ring.freed.take()
            self._freed += freed
            room += freed
        return room

    def _post(self, frame: bytearray) -> bool:
        """Write a frame; return False and keep the rest as the first to wait if the pipe is full."""
        try:
            count = os.write(self.pipe, frame)
        except BlockingIOError:
            count = 0
        except BrokenPipeError:  # the receiver does not read any more
            self._sealed = True
            return True
        if count == len(frame):
            return True
        self._waiting.appendleft(frame[count:])
        self.pipe_full = True
        return False

    def _flush(self) -> None:
        waiting = self._waiting
        self.pipe_full = False
        while waiting and not self._sealed:
            first = waiting[0]
            if isinstance(first, _Payload):
                copied = self._copy(first)
                if self._written == first.end:
                    waiting.popleft()
                elif not copied:
                    break
                if self._written - self._announced < CHUNK_BYTES:
                    continue
            elif self._announced == self._written:
                waiting.popleft()
                if self._post(first):
                    continue
                return
            if not self._announce():
                return
        if self._announced < self._written:
            self._announce()

    def _copy(self, payload: _Payload) -> bool:
        """Copy what there is room for, up to a chunk; return whether there was any."""
        at = self._written
        count = min(payload.end - at, CHUNK_BYTES)
        count = min(count, self._room(count))
        if count:
            self._ring.write(at, payload.address + at - payload.start, count)
            self._written = at + count
        return count > 0

    def _announce(self) -> bool:
        """Send how much more is in the ring; return whether the pipe had room."""
        announced, self._announced = self._announced, self._written
        return self._post(wire.more_frame(self._written - announced))


@final
class FrameReader:
    """The receiving end, for one thread.

    Args:
        source: the worker at the other end.
        pipe: file descriptor of the reading end, which never blocks.
        ring: carries the tensors.
        deliver: called with each message and credit.
    """

    def __init__(self, source: int, pipe: int, ring: Ring, deliver: Callable[[Delivery], None]) -> None:
        self.pipe = pipe
        self.ended = False
        """Whether the sender has closed normally; nothing follows."""
        self._source, self._ring, self._deliver = source, ring, deliver
        self._rest = b""  # the beginning of a frame
        self._position = 0  # in the ring
        self._head: wire.Head | None = None  # of the message whose body or tensors come through the ring
        self._body: bytearray | None = None  # its body, if that does not fit into a frame
        self._message: Message | None = None
        self._parts: deque[tuple[int, int]] = deque()  # address and bytes of what is still to be filled

    def read(self) -> bool:
        """Read what is in the pipe and deliver what is complete; return whether more may follow.

        Raises:
            InternalError: what was read is no message.
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
            if head.kind == wire.MESSAGE and self._head is None:
                message, apart = wire.decode(head, data, body)
                if apart:
                    self._head = head
                    self._await(message, apart)
                else:
                    self._deliver(Arrived(self._source, message))
            elif not self._take(head):
                return False
            at = stop
        self._rest = data[at:]
        return True

    def _take(self, head: wire.Head) -> bool:
        """Handle a frame other than a whole message; return whether more may follow."""
        if head.kind == wire.MORE:
            self._fill(head.number)
        elif self._head is not None:
            raise wire.unexpected(head)
        elif head.kind == wire.GRANT:
            self._deliver(Granted(self._source, head.number))
        elif head.kind == wire.MESSAGE_APART:
            self._head, self._body = head, bytearray(head.length)
            self._parts.append((ctypes.addressof(ctypes.c_char.from_buffer(self._body)), head.length))
        elif head.kind == wire.END:
            self.ended = True
            return False
        else:
            raise wire.unexpected(head)
        return True

    def _await(self, message: Message, apart: Sequence[torch.Tensor]) -> None:
        self._message = message
        self._parts.extend([(tensor.data_ptr(), tensor.nbytes) for tensor in apart])

    def _fill(self, count: int) -> None:
        """Copy out `count` bytes from the ring."""
        parts, ring = self._parts, self._ring
        if count > ring.size:
            raise _damaged(count)
        while count:
            if not parts:
                raise _damaged(count)
            address, missing = parts[0]
            step = min(count, missing, CHUNK_BYTES)
            ring.read(self._position, address, step)
            if step == missing:
                parts.popleft()
            else:
                parts[0] = (address + step, missing - step)
            self._position += step
            count -= step
            ring.freed.add(step)
            if not parts:
                self._complete()

    def _complete(self) -> None:
        """The awaited body, or the message with all its tensors, is complete."""
        assert self._head is not None
        if self._message is None:
            assert self._body is not None
            self._await(*wire.decode(self._head, self._body))
        if self._message is not None and not self._parts:
            self._deliver(Arrived(self._source, self._message))
            self._head = self._body = self._message = None


def _damaged(count: int) -> InternalError:
    return InternalError(
        "ring between two workers",
        got=f"{count} bytes announced",
        expected="no more than its size, and than the tensors announced before",
        remedy="Check whether a worker writes outside its own memory.",
    )
