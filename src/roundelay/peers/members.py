"""The members' service of a run: where machines that have a certificate leave texts and files for one another.

It listens behind the same port as the door, with TLS in both directions. Its calls:

=======  ========================================================================================================
Put      leaves a short text under a name, once; a member's names end in its own
Get      waits for a text, and returns it
Take     returns bytes that the host has left for this member, in pieces
=======  ========================================================================================================

A listener stands before it, which cuts whoever does not prove in time to be a member, and reports it.
What a member says is never more than :data:`MOST_BYTES`; it may read the texts of others, and no bytes left for them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, final

from roundelay.errors import DeadlineError, WorkerLostError
from roundelay.membership.roster import WITHDRAWN
from roundelay.peers.gate import Gate
from roundelay.peers.import_grpc import import_grpc
from roundelay.peers.listener import LOOPBACK, MEMBER_LIMITS, Service
from roundelay.trust.authority import WORKER, Credentials, role_of
from roundelay.trust.certificates import ROLE_PREFIX

MOST_BYTES, MOST_TEXTS = 64 * 1024, 256
"""Most bytes of a text, and most texts of a member."""

PIECE_BYTES = 2**20
OPEN_S = 5.0
PING_MS = 20_000
"""Milliseconds between two pings of a member that waits, and between two of the host to it."""

PONG_MS = 60_000
"""Milliseconds that a ping's answer may take: it waits behind what a slow line still carries."""

HERE = "here"
"""Name of a text that is always there."""

SERVICE = "roundelay.Members"
PUT, GET, TAKE = (f"/{SERVICE}/{method}" for method in ("Put", "Get", "Take"))

REASONS = ("wrong role", "not yours", "oversize", "unreadable", "said before", "too many texts", "unknown method")
"""Why a member was refused; or its seat is withdrawn (:data:`roundelay.membership.roster.WITHDRAWN`)."""
ROLE, NOT_YOURS, OVERSIZE, UNREADABLE, SAID, TOO_MANY, UNKNOWN = REASONS

_NAME = re.compile(r"[\w. /-]{1,128}")

HOST_NAME = "roundelay-host"
"""The name in the host's certificate."""

OPTIONS = {
    "grpc.max_receive_message_length": MEMBER_LIMITS.sent,
    "grpc.max_metadata_size": 8 * 1024,
    "grpc.max_concurrent_streams": 16,
    "grpc.so_reuseport": 0,
    "grpc.http2.min_ping_interval_without_data_ms": PING_MS // 2,  # else a member that waits for minutes is cut
    "grpc.keepalive_time_ms": PING_MS,
    "grpc.keepalive_timeout_ms": PONG_MS,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.server_handshake_timeout_ms": int(1000 * 3 * OPEN_S),  # the listener cuts first, and reports
}


@final
class Members:
    """Serves until it is closed. Its methods may be called from any thread.

    Args:
        credentials: of the host.
        gate: the port of this machine, in whose loop it runs.
        refuse: called with the peer and one of :data:`REASONS`, or of those of a door.
        left: called in the loop's thread with the name of a member whose connection has ended. It must not block.

    Raises:
        UsageError: a package is not installed.
    """

    def __init__(
        self,
        credentials: Credentials,
        gate: Gate,
        refuse: Callable[[str, str], None],
        left: Callable[[str], None] = lambda member: None,
    ) -> None:
        self._left, self._gone, self._withdrawn = left, set[str](), set[str]()
        self._telling: set[asyncio.Future[None]] = set()
        self._gate, self._loop, self._refuse, self._grpc = gate, gate.loop, refuse, import_grpc()
        self._texts: dict[str, str] = {HERE: ""}
        self._files: dict[tuple[str, str], bytes] = {}  # by the member's name and the file's
        self._counts: dict[str, int] = {}
        self._changed = self._loop.run(_condition(), OPEN_S)
        self._loop.run(self._open(credentials), OPEN_S)

    def put(self, name: str, text: str) -> None:
        """Leave a text, as the host."""
        self._loop.run(self._put(name, text), OPEN_S)

    def get(self, name: str, deadline_s: float) -> str:
        """Wait for a text.

        Raises:
            WorkerLostError: it does not come in time, or the member has left.
        """
        what, _, member = name.rpartition(" ")
        try:
            text = self._loop.run(self._get(name, member), deadline_s)
        except DeadlineError as error:
            raise _lost(member, f"no {what} within {deadline_s:g} s") from error
        if text is None:
            raise _lost(member, "it has left")
        return text

    def find(self, name: str) -> str | None:
        """Return a text if it is there."""
        return self._texts.get(name)

    def withdraw(self, member: str) -> None:
        """Take no more texts from a member, and give it none; bytes that are left for it stay."""
        self._loop.soon(self._withdrawn.add, member)

    def leave(self, member: str, name: str, data: bytes) -> None:
        """Leave bytes for one member, who gets them whenever it takes them.

        Args:
            member: the name in its certificate.
            name: of the bytes.
            data: any number of them.
        """
        self._loop.run(self._leave(member, name, data), OPEN_S)

    def drop(self, member: str, name: str) -> None:
        """Forget the bytes that were left under a name for a member."""
        self._loop.soon(self._files.pop, (member, name), None)

    def close(self) -> None:
        """Stop, and end all calls."""
        self._loop.run(self._close(), OPEN_S)

    # --- the loop's thread

    async def _open(self, own: Credentials) -> None:
        grpc = self._grpc
        self._server = grpc.aio.server(options=[*OPTIONS.items()])
        self._server.add_generic_rpc_handlers((_handler(grpc, self),))
        proving = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, require_client_auth=True)
        port = self._server.add_secure_port(f"{LOOPBACK}:0", proving)
        await self._server.start()
        self._gate.listener.serve(HOST_NAME, Service(port, MEMBER_LIMITS))

    async def _close(self) -> None:
        await self._gate.listener.leave(HOST_NAME)
        await self._server.stop(None)

    async def _put(self, name: str, text: str) -> None:
        async with self._changed:
            self._texts[name] = text
            self._changed.notify_all()

    async def _get(self, name: str, member: str = "") -> str | None:
        """A text when it is there; None if the member from whom it should come has left."""
        async with self._changed:
            await self._changed.wait_for(lambda: name in self._texts or member in self._gone)
            return self._texts.get(name)

    async def _leave(self, member: str, name: str, data: bytes) -> None:
        async with self._changed:
            self._files[member, name] = data
            self._changed.notify_all()

    async def _member(self, context: Any) -> str:
        """The name of the member that calls."""
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if role_of(names) != WORKER:
            await self._abort(context, ROLE)
        member = next((name.decode() for name in names if not name.startswith(ROLE_PREFIX.encode())), "")
        if member not in self._withdrawn:  # else a new connection lasts no longer than a stranger's
            self._gate.listener.stay(context.peer(), partial(self._ended, member))
        return member

    def _ended(self, member: str) -> None:
        self._gone.add(member)
        self._left(member)
        telling = asyncio.ensure_future(self._tell())
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _speaker(self, context: Any) -> str:
        """The name of the member that calls, which has a seat still."""
        member = await self._member(context)
        if member in self._withdrawn:
            await self._abort(context, WITHDRAWN)
        return member

    async def _abort(self, context: Any, reason: str) -> None:
        self._refuse(self._gate.listener.settle(context.peer()), reason)
        await context.abort(self._grpc.StatusCode.PERMISSION_DENIED, reason)

    async def said(self, received: bytes, context: Any) -> bytes:
        """Answer Put: a name and a text, separated by a zero byte."""
        member = await self._speaker(context)
        name, text = await self._read(received, context)
        if not name.endswith(f" {member}"):
            await self._abort(context, NOT_YOURS)
        if name in self._texts:
            await self._abort(context, SAID)
        self._counts[member] = self._counts.get(member, 0) + 1
        if self._counts[member] > MOST_TEXTS:
            await self._abort(context, TOO_MANY)
        await self._put(name, text)
        return b""

    async def asked(self, received: bytes, context: Any) -> bytes:
        """Answer Get."""
        member = await self._speaker(context)
        name, _ = await self._read(received, context)
        text = await self._get(name) or ""
        if member in self._withdrawn:  # meanwhile
            await self._abort(context, WITHDRAWN)
        return text.encode()

    async def taken(self, received: bytes, context: Any) -> AsyncIterator[bytes]:
        """Answer Take: the number of bytes, then the bytes."""
        member = await self._member(context)
        name, _ = await self._read(received, context)
        data = memoryview(await self._file(member, name))
        yield len(data).to_bytes(8, "little")
        for start in range(0, len(data), PIECE_BYTES):
            yield bytes(data[start : start + PIECE_BYTES])

    async def _file(self, member: str, name: str) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: (member, name) in self._files)
            return self._files[member, name]

    async def unknown(self, received: bytes, context: Any) -> bytes:
        """Refuse any other call."""
        await self._member(context)
        await self._abort(context, UNKNOWN)
        return b""

    async def _read(self, received: bytes, context: Any) -> tuple[str, str]:
        name, _, text = received.partition(b"\0")
        if len(received) > MOST_BYTES:
            await self._abort(context, OVERSIZE)
        try:
            words = name.decode(), text.decode()
        except UnicodeDecodeError:
            words = "", ""
        if not _NAME.fullmatch(words[0]):
            await self._abort(context, UNREADABLE)
        return words


def _lost(member: str, got: str) -> WorkerLostError:
    return WorkerLostError(
        member,
        got=got,
        expected="a machine that stays until the run has ended",
        remedy="Ask its owner what `roundelay join` said there, and host the run again.",
    )


async def _condition() -> asyncio.Condition:
    return asyncio.Condition()


def _handler(grpc: Any, members: Members) -> Any:
    methods = {
        PUT: grpc.unary_unary_rpc_method_handler(members.said),
        GET: grpc.unary_unary_rpc_method_handler(members.asked),
        TAKE: grpc.unary_stream_rpc_method_handler(members.taken),
    }
    unknown = grpc.unary_unary_rpc_method_handler(members.unknown)

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return methods.get(details.method, unknown)

    return Handler()
