"""One stream of the transport `grpc`: what a worker writes to another, frame by frame, and what has come from it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, final

import torch

from roundelay.transport import envelope as envelopes
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import Message
from roundelay.transport.envelope import Position
from roundelay.transport.framed_endpoint import Link, decoded
from roundelay.transport.wire_layout import unreadable

Item = tuple[bytearray, Sequence[torch.Tensor]]
"""A frame, and the tensors that follow it."""

Write = Callable[[bytes], Awaitable[None]]


@final
class GrpcLink(Link):
    """The stream to one other worker, which the loop reads and writes.

    Args:
        worker: the other.
        generation: of the run.
        loop: that reads and writes.
    """

    def __init__(self, worker: int, generation: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(worker)
        self.written = 0  # number of the last piece
        self.position: Position | None = None  # what must come next, once HELLO has come
        self.opened = asyncio.Event()
        self.done = threading.Event()  # the handshake is complete, or the stream broken
        self._generation, self._loop = generation, loop
        self._queue: deque[Item | None] = deque()
        self._idle, self._wake = False, asyncio.Event()  # idle: the writer waits to be woken
        self._pieces: list[memoryview] = []  # of a message that is not yet whole

    def put(self, item: Item | None) -> None:
        """Queue what is to be written, from any thread; None ends the writing."""
        self._queue.append(item)  # before reading the flag: the writer sets the flag, then looks into the queue
        if self._idle:
            self._idle = False
            self._loop.call_soon_threadsafe(self._wake.set)

    async def write_queued(self, write: Write) -> None:
        """Write what is queued, until None comes."""
        while True:
            while self._queue:
                item = self._queue.popleft()
                if item is None:
                    return
                await self._write_message(write, *item)
            self._wake.clear()
            self._idle = True
            if not self._queue:
                await self._wake.wait()
            self._idle = False

    async def _write_message(self, write: Write, frame: bytearray, apart: Sequence[torch.Tensor]) -> None:
        pieces = envelopes.cut([memoryview(frame), *map(_bytes_of, apart)])
        for i, parts in enumerate(pieces):
            kind = envelopes.MORE if i else envelopes.FIRST if len(pieces) > 1 else envelopes.WHOLE
            self.written += 1
            await write(envelopes.seal(kind, self._generation, self.written, parts, len(pieces)))

    def completed(self, piece: Any, most_pieces: int) -> memoryview | None:
        """Check a piece; return the message that it completes, if it does.

        Args:
            piece: as gRPC returns it.
            most_pieces: of a message.

        Raises:
            ConnectionError: the stream has ended.
            InternalError: another piece must come.
        """
        if not isinstance(piece, bytes):
            raise ConnectionError("the stream ended")
        head, body = envelopes.unseal(piece)
        if head.total > most_pieces:
            raise unreadable(envelopes.OVERSIZE)
        assert self.position is not None
        self.position = envelopes.follow(self.position, head)
        self._pieces.append(body)
        if self.position.left:
            return None
        received = memoryview(b"".join(self._pieces)) if len(self._pieces) > 1 else body
        self._pieces.clear()
        return received


def head_in(received: memoryview) -> wire.Head:
    """Return the head of a frame; what follows a message is for :func:`message_in` to compare."""
    if len(received) < wire.HEAD_BYTES:
        raise unreadable(envelopes.TRUNCATED)
    head = wire.head_of(bytes(received[: wire.HEAD_BYTES]))
    if head.kind not in wire.MESSAGES and len(received) != wire.HEAD_BYTES + head.length:
        raise unreadable(envelopes.TRUNCATED)
    return head


def message_in(head: wire.Head, received: memoryview) -> Message:
    """Return a message; memory is allocated for what has come, not for what is announced."""
    at = wire.HEAD_BYTES + head.length
    body = received[wire.HEAD_BYTES : at]
    if at > len(received) or wire.apart_bytes(head, body) != len(received) - at:
        raise unreadable(envelopes.TRUNCATED)
    message, apart = decoded(head, body)
    for tensor in apart:
        _bytes_of(tensor)[:] = received[at : at + tensor.nbytes]
        at += tensor.nbytes
    return message


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
