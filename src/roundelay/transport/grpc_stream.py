"""The `grpc` transport: workers are processes that prove who they are; messages travel over gRPC with mutual TLS.

Two workers share one stream in both directions, on which the lower number serves. It carries the frames of the wire
format in the pieces of :mod:`roundelay.transport.envelope`. Each side shows a certificate of the run's authority, and
must be the worker that its HELLO names; whatever else connects is refused.

An event loop in a thread of its own reads and writes all streams; `send` adds to a queue, and wakes the loop only if
the stream's writer is idle.

A link ends with the handshake of :mod:`roundelay.transport.framed_endpoint`; pings notice a silent one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, final

import torch

from roundelay.errors import DeadlineError, InternalError, RoundelayError, WorkerLostError
from roundelay.ir.transports import check_packages
from roundelay.transport import envelope as envelopes
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import MAX_MESSAGE_BYTES, ForkedLinks
from roundelay.transport.envelope import PIECE_BYTES, Position
from roundelay.transport.framed_endpoint import ABORT_GRACE_S, FLUSH_S, FramedEndpoint, rendezvous_file
from roundelay.transport.grpc_link import GrpcLink, head_in, message_in
from roundelay.transport.grpc_member import HELLO_S, LOOPBACK, Member, load_grpc, name_of
from roundelay.transport.meeting import FileMeeting
from roundelay.transport.wire_layout import unreadable
from roundelay.trust.authority import WORKER, new_authority, role_of
from roundelay.trust.invitation import address_text

VALID = timedelta(days=1)
"""How long a run's certificates can open streams; open ones stay."""

MOST_WAITING, MOST_UNREAD = 4096, 4
"""Messages, and greatest messages by their bytes, that may wait for the worker before no more are read."""

READ_BYTES = 256
"""Memory that a byte of a message's layout takes once it is read; the layout of a tensor has 3 bytes or more."""

PAUSE_S = 0.002
ROLE, GARBLED = "wrong role", "no message"
REASONS = (*envelopes.REASONS, ROLE, GARBLED)
"""Why whoever connects, or what a worker sends, was refused."""

_SERVICE, _METHOD = "roundelay", "Link"


@final
class GrpcEndpoint(FramedEndpoint[GrpcLink]):
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
        self._closing: list[Callable[[], Awaitable[None]]] = []
        self._carrying: list[asyncio.Task[str | None]] = []
        self._loop = asyncio.new_event_loop()
        self._links = {k: GrpcLink(k, member.generation, self._loop) for k in self._others}
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

    def _post(
        self, link: GrpcLink, frame: bytearray, apart: Sequence[torch.Tensor] = (), *, last: bool = False
    ) -> None:
        with link.lock:
            if link.sealed:
                return
            link.sealed = last
            link.put((frame, apart))

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
        grpc = load_grpc()
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
        self._member.meeting.set(self._member.name(self.worker), address_text(address))

    async def _serve(self, _: object, context: Any) -> None:
        """Carry what a worker sends that has called, once it is known to be the one that it says."""
        try:
            first = await asyncio.wait_for(context.read(), HELLO_S)
            link = self._admit(first, context.auth_context().get("x509_subject_alternative_name", ()))
        except (TimeoutError, InternalError) as error:
            peer = context.peer()
            where = _address_of(peer) if self._front is None else self._front.settle(peer)
            await context.abort(load_grpc().StatusCode.PERMISSION_DENIED, self._count(where, error))
        if self._front is not None:
            self._front.stay(context.peer())
        await context.write(self._hello())
        link.opened.set()
        if reason := await self._carry(link, context):
            await context.abort(load_grpc().StatusCode.PERMISSION_DENIED, reason)

    def _admit(self, piece: Any, names: Sequence[bytes]) -> GrpcLink:
        """The link that a HELLO opens, by a worker whose certificate has these names."""
        position, claimed = self._read_hello(piece)
        link = self._links.get(claimed)
        if link is None or claimed < self.worker or self._member.name(claimed).encode() not in names:
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

    async def _call(self, grpc: Any, link: GrpcLink) -> None:
        """Open the stream to a worker that serves, and leave a task that carries what it sends."""
        own = self._member.credentials
        address = await self._loop.run_in_executor(None, self._member.meeting.get, self._member.name(link.worker))
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

    async def _carry(self, link: GrpcLink, stream: Any, call: Any = None) -> str | None:
        """Read and write a stream until its handshake is complete or it breaks; return why it was refused, if so."""
        writer = self._loop.create_task(link.write_queued(stream.write))
        writer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the reader fails, and reports it
        try:
            while not (link.ended and link.acknowledged):
                while self._is_flooded():
                    await asyncio.sleep(PAUSE_S)
                self._accept(link, await stream.read())
            link.put(None)
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
            link.done.set()
            reason = self._count(self._member.name(link.worker), fault)
            while not self._inbox.empty():  # cut off sooner, its sender tells of a loss before this worker does
                await asyncio.sleep(PAUSE_S)
            return reason
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

    def _accept(self, link: GrpcLink, piece: Any) -> None:
        """Check a piece; handle the message that it completes."""
        received = link.completed(piece, self._most_pieces)
        if received is not None:
            head = head_in(received)
            self._weigh(link, head, len(received))
            self._handle(link, head, lambda: message_in(head, received), lambda: received[wire.HEAD_BYTES :])

    def _weigh(self, link: GrpcLink, frame: wire.Head, num_bytes: int) -> None:
        """Count what waits for the worker; refuse more credits than a plan has messages in flight."""
        if frame.kind in wire.MESSAGES:
            self._unread += num_bytes + READ_BYTES * frame.layout
        elif frame.kind == wire.GRANT and self._waiting_credits(link) > MOST_WAITING:
            raise wire.unexpected(frame)

    def _waiting_credits(self, link: GrpcLink) -> int:
        """How many of a worker's credits wait, counted only if many of all do."""
        if len(self._credits) <= MOST_WAITING:
            return 0
        return [credit.source for credit in list(self._credits)].count(link.worker)

    def _acknowledge(self, link: GrpcLink) -> None:
        self._post(link, wire.end_frame(""), last=True)
        link.put((wire.ack_frame(), ()))

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


def _address_of(peer: str) -> str:
    """Address and port of what gRPC calls ``ipv4:127.0.0.1:40000``."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")


async def _told(call: Any, error: Exception) -> str:
    """What the other side has said, or the error."""
    details = await call.details() if call is not None and call.done() else None
    return str(details or (error.got if isinstance(error, RoundelayError) else f"{type(error).__name__}: {error}"))
