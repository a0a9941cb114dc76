"""The `grpc` transport: workers are processes that prove who they are; messages travel over gRPC with mutual TLS.

Two workers share one stream in both directions, on which the lower number serves. It carries the frames of the wire
format in the pieces of :mod:`roundelay.transport.envelope`. Each side shows a certificate of the run's authority, and
must be the worker that its HELLO names; whatever else connects is refused.

gRPC is imported in the worker's own process: a process that has used it must not fork. An event loop in a thread of its
own reads and writes all streams; `send` adds to a queue, and wakes the loop only if the stream's writer is idle.

A link ends with the handshake of :mod:`roundelay.transport.framed_endpoint`; pings notice a silent one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, final

import torch

from roundelay import env
from roundelay.errors import DeadlineError, InternalError, RoundelayError, WorkerLostError
from roundelay.ir.transports import check_packages
from roundelay.optional_packages import optional
from roundelay.transport import envelope as envelopes
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import MAX_MESSAGE_BYTES, ForkedLinks, Message
from roundelay.transport.envelope import PIECE_BYTES, Position
from roundelay.transport.framed_endpoint import ABORT_GRACE_S, FLUSH_S, FramedEndpoint, Link, decoded, rendezvous_file
from roundelay.transport.meeting import FileMeeting, Meeting
from roundelay.transport.wire_layout import unreadable
from roundelay.trust.authority import WORKER, Credentials, new_authority, role_of
from roundelay.trust.certificates import domain_of
from roundelay.trust.invitation import Address, address_text

LOOPBACK = "127.0.0.1"

HELLO_S = 5.0
"""Seconds that whoever connects has to say who it is."""

VALID = timedelta(days=1)
"""How long a run's certificates can open streams; open ones stay."""

SILENT_MS = 3500
"""Milliseconds that a ping's answer may take: later than the launcher notices that a worker is stopped, and says so.

Without `grpc.http2.ping_timeout_ms` it would be a minute."""

OPTIONS = {
    "grpc.max_receive_message_length": PIECE_BYTES + envelopes.HEADER_BYTES,
    "grpc.keepalive_time_ms": 1000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.min_ping_interval_without_data_ms": 500,  # else the server cuts a stream that is idle but pinged
    "grpc.server_handshake_timeout_ms": 1000 * int(HELLO_S),
    "grpc.so_reuseport": 0,
    "grpc.enable_http_proxy": 0,
}
MOST_WAITING, MOST_UNREAD = 4096, 4
"""Messages, and greatest messages by their bytes, that may wait for the worker before no more are read."""

READ_BYTES = 256
"""Memory that a byte of a message's layout takes once it is read; the layout of a tensor has 3 bytes or more."""

PAUSE_S = 0.002
ROLE, GARBLED = "wrong role", "no message"
REASONS = (*envelopes.REASONS, ROLE, GARBLED)
"""Why whoever connects, or what a worker sends, was refused."""

NEEDED = ("transport grpc", "roundelay[join]", ", or choose another transport.")
_QUIET = ("GRPC_VERBOSITY", "NONE")
_SERVICE, _METHOD = "roundelay", "Link"


def name_of(worker: int) -> str:
    """The name in a worker's certificate."""
    return f"worker-{worker}"


class Front(Protocol):
    """What listens before the endpoints of a machine: :class:`roundelay.peers.gate.Gate`."""

    async def serve(self, name: str, target: int) -> Address:
        """Pass on to a port of this machine who asks for a server of this name; return where the others do."""
        ...

    def stay(self, peer: str) -> object:
        """Let a connection last, known to the server as `peer`, that has proved whose it is."""
        ...

    def settle(self, peer: str) -> str:
        """Return the address of a connection that the endpoint refuses itself."""
        ...

    async def leave(self, name: str) -> None:
        """Cut those connections, and pass on no more."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Member:
    """How a worker finds the others of its run, and proves who it is.

    Args:
        credentials: by which this worker, called `name_of` it, and the others prove who they are.
        meeting: where those that serve write their addresses.
        generation: of the run; what is of another is refused.
        service: the endpoint's name among those of this worker that are behind one front; empty: it is the only one.
        silent_ms: milliseconds that a ping's answer may take.
        refuse: called in the loop's thread with the peer, an address or a worker's name, and one of :data:`REASONS`.
        front: what listens before the endpoint; None: nothing does.
        host: the address at which the endpoint listens if nothing does before it.
    """

    credentials: Credentials
    meeting: Meeting
    generation: int = 0
    service: str = ""
    silent_ms: int = SILENT_MS
    refuse: Callable[[str, str], None] | None = None
    front: Front | None = None
    host: str = LOOPBACK

    def server(self, worker: int) -> str:
        """The name by which a worker's endpoint is asked for, which its certificate has."""
        return f"{self.service}.{domain_of(name_of(worker))}" if self.service else name_of(worker)

    def options(self) -> dict[str, int]:
        """Options of the member's servers and channels."""
        return OPTIONS | {"grpc.keepalive_timeout_ms": self.silent_ms, "grpc.http2.ping_timeout_ms": self.silent_ms}


@final
class GrpcEndpoint(FramedEndpoint["_Link"]):
    """One process's endpoint. Its constructor returns when all `num_workers` have connected.

    Args:
        worker: this worker's number.
        others: the workers with which it shares a stream.
        member: how it finds them.
        deadline_s: seconds that connecting, and later `close`, may take.
        most_bytes: of a message that comes.

    Raises:
        DeadlineError: not all workers came in time.
        WorkerLostError: one refused this worker, or is not whom it must be.
    """

    refused: Counter[str]
    """How often something was refused, by reason (:data:`REASONS`)."""

    def __init__(
        self,
        worker: int,
        others: Iterable[int],
        member: Member,
        deadline_s: float,
        most_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__(worker, others, deadline_s)
        self._member, self._most_pieces = member, -(-(most_bytes + wire.HEAD_BYTES) // PIECE_BYTES)
        self.refused, self._unread = Counter(), 0  # bytes that have come since the worker had taken everything
        self._front = member.front
        self._links = {other: _Link(other) for other in self._others}
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._carrying: list[asyncio.Task[str | None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc", daemon=True)
        self._thread.start()
        self._connect()

    def _connect(self) -> None:
        opening = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        try:
            opening.result(self._deadline_s)
        except BaseException as error:
            self._stop()
            if not isinstance(error, LateError):
                raise
            raise DeadlineError(
                f"worker {self.worker} connecting to the others",
                got=f"none of workers {[k for k, link in self._links.items() if not link.opened.is_set()]}",
                expected=f"{len(self._links)} others within {self._deadline_s:g} s",
                remedy="Check which worker did not start.",
            ) from None

    # --- the worker's threads

    def _post(self, link: _Link, frame: bytearray, apart: Sequence[torch.Tensor] = (), *, last: bool = False) -> None:
        with link.lock:
            if link.sealed:
                return
            link.sealed = last
            self._queue(link, (frame, apart))

    def _queue(self, link: _Link, item: _Item | None) -> None:
        link.queue.append(item)  # before reading the flag: the writer sets the flag, then looks into the queue
        if link.idle:
            link.idle = False
            self._loop.call_soon_threadsafe(link.wake.set)

    def _leave(self, reason: str, grace_s: float) -> list[int]:
        deadline = time.monotonic() + grace_s
        for link in self._links.values():
            self._post(link, wire.end_frame(reason), last=True)
        late = [k for k, link in self._links.items() if not link.done.wait(max(0.0, deadline - time.monotonic()))]
        if self._fault is not None:  # nobody reads the answer of the worker whose message did not fit
            time.sleep(FLUSH_S)
        self._stop()
        return late

    def _stop(self) -> None:
        with suppress(LateError):
            asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(ABORT_GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ABORT_GRACE_S)

    # --- the loop's thread

    async def _open(self) -> None:
        """Serve the workers with higher numbers, and call those with lower ones."""
        grpc = _grpc()
        if any(other > self.worker for other in self._links):
            await self._listen(grpc)
        await asyncio.gather(*[self._call(grpc, link) for k, link in self._links.items() if k < self.worker])
        for link in self._links.values():
            await link.opened.wait()

    async def _listen(self, grpc: Any) -> None:
        own = self._member.credentials
        server = grpc.aio.server(options=[*self._member.options().items()])
        methods = {_METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
        proving = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, require_client_auth=True)
        front, name = self._front, self._member.server(self.worker)
        host = self._member.host if front is None else LOOPBACK
        address = host, server.add_secure_port(f"{host}:0", proving)
        self._closing.append(lambda: server.stop(None))
        await server.start()
        if front is not None:
            self._closing.insert(0, lambda: front.leave(name))
            address = await front.serve(name, address[1])
        self._member.meeting.set(name_of(self.worker), address_text(address))

    async def _serve(self, _: object, context: Any) -> None:
        """Carry what a worker sends that has called, once it is known to be the one that it says."""
        try:
            first = await asyncio.wait_for(context.read(), HELLO_S)
            link = self._admit(first, context.auth_context().get("x509_subject_alternative_name", ()))
        except (TimeoutError, InternalError) as error:
            peer = context.peer()
            where = _address_of(peer) if self._front is None else self._front.settle(peer)
            await context.abort(_grpc().StatusCode.PERMISSION_DENIED, self._count(where, error))
        if self._front is not None:
            self._front.stay(context.peer())
        await context.write(self._hello())
        link.opened.set()
        if reason := await self._carry(link, context):
            await context.abort(_grpc().StatusCode.PERMISSION_DENIED, reason)

    def _admit(self, piece: Any, names: Sequence[bytes]) -> _Link:
        """The link that a HELLO opens, by a worker whose certificate has these names."""
        position, claimed = self._read_hello(piece)
        link = self._links.get(claimed)
        if link is None or claimed < self.worker or name_of(claimed).encode() not in names:
            raise unreadable(envelopes.MISNAMED)
        if role_of(names) != WORKER:
            raise unreadable(ROLE)
        if link.position is not None:
            raise unreadable(envelopes.TAKEN)
        link.position = position
        return link

    def _hello(self) -> bytes:
        return envelopes.seal(envelopes.HELLO, self._member.generation, 0, [self.worker.to_bytes(4, "little")])

    def _read_hello(self, piece: Any) -> tuple[Position, int]:
        head, body = envelopes.unseal(piece if isinstance(piece, bytes) else b"")
        return envelopes.follow(Position(self._member.generation), head), int.from_bytes(body, "little")

    async def _call(self, grpc: Any, link: _Link) -> None:
        """Open the stream to a worker that serves, and leave a task that carries what it sends."""
        own = self._member.credentials
        address = await self._loop.run_in_executor(None, self._member.meeting.get, name_of(link.worker))
        proving = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        options = self._member.options() | {"grpc.ssl_target_name_override": self._member.server(link.worker)}
        channel = grpc.aio.secure_channel(address, proving, options=[*options.items()])
        self._closing.append(channel.close)
        call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
        try:
            await call.write(self._hello())
            link.position, claimed = self._read_hello(await call.read())
            if claimed != link.worker:
                raise unreadable(envelopes.MISNAMED)
        except (grpc.RpcError, asyncio.InvalidStateError, InternalError) as error:
            raise WorkerLostError(
                f"worker {self.worker} connecting to worker {link.worker}",
                got=await _told(call, error),
                expected="a worker of the same run, which lets it in",
                remedy=f"Check that it reaches {address}, and that both have the same version.",
            ) from error
        link.opened.set()
        self._carrying.append(self._loop.create_task(self._carry(link, call, call)))

    async def _carry(self, link: _Link, stream: Any, call: Any = None) -> str | None:
        """Read and write a stream until its handshake is complete or it breaks; return why it was refused, if so."""
        writer = self._loop.create_task(self._write(link, stream.write))
        writer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the reader fails, and reports it
        try:
            while not (link.ended and link.acknowledged):
                while self._is_flooded():
                    await asyncio.sleep(PAUSE_S)
                self._accept(link, await stream.read())
            self._queue(link, None)
            await writer
            if call is not None:
                await call.done_writing()
                await asyncio.wait_for(call.code(), ABORT_GRACE_S)
        except MemoryError as fault:
            self._no_room(link, fault)
            link.done.set()
            await writer  # END can still be sent
        except InternalError as fault:
            self._lose_unfit(link, fault)
            return self._count(name_of(link.worker), fault)
        except asyncio.CancelledError:
            self._lose(link, "its connection broke")
            raise
        except Exception as fault:
            self._lose(link, "its connection broke: " + (await _told(call, fault)))
        finally:
            link.done.set()
            writer.cancel()
            if call is not None:
                call.cancel()
        return None

    def _is_flooded(self) -> bool:
        """Whether to read on only when the worker has taken what has come."""
        if self._inbox.empty():
            self._unread = 0
        return self._unread > MOST_UNREAD * self._most_pieces * PIECE_BYTES or self._inbox.qsize() > MOST_WAITING

    def _accept(self, link: _Link, piece: Any) -> None:
        """Check a piece; handle the message that it completes."""
        if not isinstance(piece, bytes):
            raise ConnectionError("the stream ended")
        head, body = envelopes.unseal(piece)
        if head.total > self._most_pieces:
            raise unreadable(envelopes.OVERSIZE)
        assert link.position is not None
        link.position = envelopes.follow(link.position, head)
        link.pieces.append(body)
        if not link.position.left:
            received = memoryview(b"".join(link.pieces)) if len(link.pieces) > 1 else body
            link.pieces.clear()
            frame = _head(received)
            self._weigh(link, frame, len(received))
            self._handle(link, frame, lambda: _message(frame, received), lambda: received[wire.HEAD_BYTES :])

    def _weigh(self, link: _Link, frame: wire.Head, num_bytes: int) -> None:
        """Count what waits for the worker; refuse more credits than a plan has messages in flight."""
        if frame.kind in wire.MESSAGES:
            self._unread += num_bytes + READ_BYTES * frame.layout
        elif frame.kind == wire.GRANT and self._waiting_credits(link) > MOST_WAITING:
            raise wire.unexpected(frame)

    def _waiting_credits(self, link: _Link) -> int:
        """How many of a worker's credits wait, counted only if many of all do."""
        if len(self._credits) <= MOST_WAITING:
            return 0
        return [credit.source for credit in list(self._credits)].count(link.worker)

    def _acknowledge(self, link: _Link) -> None:
        self._post(link, wire.end_frame(""), last=True)
        self._queue(link, (wire.ack_frame(), ()))

    async def _write(self, link: _Link, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write what is queued, until None comes."""
        while True:
            while link.queue:
                item = link.queue.popleft()
                if item is None:
                    return
                await self._write_message(link, write, *item)
            link.wake.clear()
            link.idle = True
            if not link.queue:
                await link.wake.wait()
            link.idle = False

    async def _write_message(
        self, link: _Link, write: Callable[[bytes], Awaitable[None]], frame: bytearray, apart: Sequence[torch.Tensor]
    ) -> None:
        pieces = envelopes.cut([memoryview(frame), *map(_bytes_of, apart)])
        for i, parts in enumerate(pieces):
            kind = envelopes.MORE if i else envelopes.FIRST if len(pieces) > 1 else envelopes.WHOLE
            link.written += 1
            await write(envelopes.seal(kind, self._member.generation, link.written, parts, len(pieces)))

    def _count(self, peer: str, error: Exception) -> str:
        got = error.got if isinstance(error, InternalError) else envelopes.TRUNCATED
        reason = got if got in REASONS else GARBLED
        self.refused[reason] += 1
        if self._member.refuse is not None:
            self._member.refuse(peer, reason)
        return reason

    async def _cut(self) -> None:
        for close in self._closing:
            await close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)


@contextmanager
def forked_over_grpc(
    num_workers: int, deadline_s: float, shared: Mapping[int, int] | None = None
) -> Generator[ForkedLinks, None, None]:
    """Connect processes of one host that are forked while the context is open; they share no memory.

    Raises:
        UsageError: a package is not installed.
    """
    check_packages("grpc")
    authority = new_authority("roundelay", datetime.now(UTC), VALID)
    own = [authority.issue(name_of(k)) for k in range(num_workers)]
    with rendezvous_file() as path:

        def connected(k: int) -> GrpcEndpoint:
            member = Member(own[k], FileMeeting(path, num_workers, deadline_s))
            return GrpcEndpoint(k, range(num_workers), member, deadline_s)

        yield ForkedLinks(connected, lambda: None)


_Item = tuple[bytearray, Sequence[torch.Tensor]]
"""A frame, and the tensors that follow it."""


class _Link(Link):
    """The stream to one other worker."""

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.queue: deque[_Item | None] = deque()
        self.idle = False  # the writer waits to be woken
        self.wake, self.opened = asyncio.Event(), asyncio.Event()
        self.written = 0  # number of the last piece
        self.position: Position | None = None  # what must come next, once HELLO has come
        self.pieces: list[memoryview] = []  # of a message that is not yet whole
        self.done = threading.Event()  # the handshake is complete, or the stream broken


def _head(received: memoryview) -> wire.Head:
    """Return the head of a frame; what follows a message is for :func:`_message` to compare."""
    if len(received) < wire.HEAD_BYTES:
        raise unreadable(envelopes.TRUNCATED)
    head = wire.head_of(bytes(received[: wire.HEAD_BYTES]))
    if head.kind not in wire.MESSAGES and len(received) != wire.HEAD_BYTES + head.length:
        raise unreadable(envelopes.TRUNCATED)
    return head


def _message(head: wire.Head, received: memoryview) -> Message:
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


def _address_of(peer: str) -> str:
    """Address and port of what gRPC calls ``ipv4:127.0.0.1:40000``."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _grpc() -> Any:
    env.set_default(*_QUIET)
    optional("grpc.aio", *NEEDED)
    return optional("grpc", *NEEDED)


async def _told(call: Any, error: Exception) -> str:
    """What the other side has said, or the error."""
    details = await call.details() if call is not None and call.done() else None
    return str(details or (error.got if isinstance(error, RoundelayError) else f"{type(error).__name__}: {error}"))
