"""The one port of a machine: listens before its gRPC servers, and passes each connection on to the one it asks for.

TLS names the server that is wanted before anything is encrypted. Bytes pass unread: this has no key. It bounds the
number of connections, in all and of one network, how long one may last and how much may come over it. gRPC does not
report what fails below a call, so this does: each connection that the server cuts before it has answered or refused a
call. Who has proved to the server who it is may stay: nothing of this bounds it any more.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from roundelay.errors import UsageError
from roundelay.membership.roster import network_of
from roundelay.peers import refusals
from roundelay.peers.server_name import server_name
from roundelay.trust.invitation import Address

LOOPBACK = "127.0.0.1"

MOST, MOST_OF_NETWORK = 64, 16
"""Most connections at one time, in all and of one network."""

FORGET_S = 2.0
"""Seconds that a connection that has ended is remembered: the server may still be about to read from it."""

HELLO_S, HELLO_BYTES = 5.0, 16 * 1024
"""Seconds and bytes in which a connection must name the server that it wants."""

_HANDSHAKE = 0x16  # first byte of a record of TLS that carries a handshake
_HEAD_BYTES = 5  # of a record: kind, version, length
_CHUNK_BYTES, _STAYING_BYTES = 4096, 2**18
"""Most bytes that are read at one time, from strangers and from who stays."""


@final
@dataclass(slots=True)
class Visit:
    """One connection.

    Args:
        address: from where it comes.
        port: the port there.
        service: the one that it has asked for; None until it has.
        settled: whether a call was answered or refused.
        greeted: whether the server has taken up TLS.
        refused: why the connection was cut by the listener; empty if it was not.
        stays: whether it may last.
        ended: called when it has ended, if it stays.
        over: whether it has ended.
        until: ends it where it may not.
    """

    address: str
    port: int
    service: Service | None = None
    settled: bool = False
    greeted: bool = False
    refused: str = ""
    stays: bool = False
    ended: Callable[[], None] = lambda: None
    over: bool = False
    until: asyncio.Timeout | None = None

    @property
    def peer(self) -> str:
        """Address and port as one text."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Of one connection, unless it stays.

    Args:
        seconds: that it may last.
        sent: bytes that may come over it.
        silent: why it is refused where the server cuts it after TLS.
    """

    seconds: float
    sent: int
    silent: str = refusals.SILENT


@final
@dataclass(frozen=True, slots=True)
class Service:
    """A server behind the port.

    Args:
        port: where it listens on loopback.
        limits: of a connection to it.
    """

    port: int
    limits: Limits


@final
class Listener:
    """Accepts connections, and passes each on to a server of this machine. Its methods belong to one event loop.

    Args:
        refuse: is called with the peer and one of :data:`roundelay.peers.refusals.DOOR_REASONS`.
    """

    address: Address
    """Where it listens."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        self._refuse = refuse
        self._services: dict[str, Service] = {}
        self._visits: dict[int, Visit] = {}  # by the port from which the server sees the connection come
        self._networks: Counter[str] = Counter()
        self._tasks: dict[asyncio.Task[None], Visit] = {}
        self._server: asyncio.Server | None = None

    async def open(self, listen: Address) -> Address:
        """Listen on one address, port 0 for any; return where it listens.

        Raises:
            UsageError: it cannot listen there.
        """
        self._server = await asyncio.start_server(self._accept, sock=_bound(listen), limit=_STAYING_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = host, port
        return self.address

    def serve(self, name: str, service: Service) -> None:
        """Pass those on who ask for this name."""
        self._services[name] = service

    async def leave(self, name: str) -> None:
        """Cut those that have asked for a name, and pass nobody on any more who does."""
        service = self._services.pop(name, None)
        await _cancelled([task for task, visit in self._tasks.items() if service and visit.service is service])

    async def close(self) -> None:
        """Cut all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
        await _cancelled([*self._tasks])

    def visit_of(self, peer: str) -> Visit:
        """Return the visit that the gRPC server knows as `peer`, such as ``ipv4:127.0.0.1:40000``."""
        _, _, port = peer.rpartition(":")
        number = int(port) if port.isdecimal() else 0
        return self._visits.get(number) or Visit(LOOPBACK, number)  # else it has come past the listener

    def settle(self, peer: str) -> str:
        """Return the address of who the server knows as `peer`, and has answered or refused."""
        visit = self.visit_of(peer)
        visit.settled = True
        return visit.peer

    def stay(self, peer: str, ended: Callable[[], None] = lambda: None) -> None:
        """Let the connection last that the server knows as `peer`: it has proved whose it is.

        Args:
            peer: as the server knows it.
            ended: called in the loop's thread when the connection has ended. It must not block.
        """
        visit = self.visit_of(peer)
        visit.settled, visit.ended = True, ended
        if visit.over:
            return ended()
        if not visit.stays:
            visit.stays = True
            if visit.until is not None:
                visit.until.reschedule(None)
                self._networks -= Counter({network_of(visit.address): 1})

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = (writer.get_extra_info("peername") or ("unknown", 0))[:2]
        visit, network = Visit(address, port), network_of(address)
        if self._networks.total() >= MOST or self._networks[network] >= MOST_OF_NETWORK:
            writer.transport.abort()
            return self._refuse(visit.peer, refusals.CROWDED)
        self._networks[network] += 1
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._attend(visit, reader, writer))
        self._tasks[task] = visit
        task.add_done_callback(lambda _: self._leave(task, visit, writer))

    def _leave(self, task: asyncio.Task[None], visit: Visit, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        if not visit.stays:
            self._networks -= Counter({network_of(visit.address): 1})
        self._tasks.pop(task, None)
        visit.over = True
        visit.ended()

    async def _attend(self, visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S) as visit.until:
                await self._pass_on(visit, reader, writer)
        except TimeoutError:
            visit.refused = visit.refused or refusals.SLOW
        except OSError:  # it has left
            pass
        if visit.refused and not visit.settled:
            self._refuse(visit.peer, visit.refused)

    async def _pass_on(self, visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await self._greeting(visit, reader)
        if visit.service is None or visit.until is None:
            return
        visit.until.reschedule(asyncio.get_running_loop().time() + visit.service.limits.seconds)
        inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, visit.service.port)
        port = inner_writer.get_extra_info("sockname")[1]
        self._visits[port] = visit
        try:
            inner_writer.write(hello)
            await _first_of(
                self._send(visit, visit.service.limits, reader, inner_writer, len(hello)),
                self._receive(visit, visit.service.limits, inner_reader, writer),
            )
        finally:
            inner_writer.transport.abort()
            asyncio.get_running_loop().call_later(FORGET_S, self._forget, port, visit)

    async def _greeting(self, visit: Visit, reader: asyncio.StreamReader) -> bytes:
        """Read until a connection has asked for a service, or must be refused; return what has come."""
        hello = b""
        while not visit.refused and visit.service is None and (chunk := await reader.read(_CHUNK_BYTES)):
            hello += chunk
            visit.service, visit.refused = self._asked(hello)
        return hello

    def _asked(self, hello: bytes) -> tuple[Service | None, str]:
        """The service that these first bytes ask for, or why they are refused, or neither if more must come."""
        if hello[0] != _HANDSHAKE:
            return None, refusals.PLAINTEXT
        if len(hello) < _HEAD_BYTES + int.from_bytes(hello[3:_HEAD_BYTES], "big"):
            return None, refusals.OVERSIZE if len(hello) > HELLO_BYTES else ""
        try:
            name = server_name(hello)
        except ssl.SSLError:
            return None, refusals.BROKEN
        if name is None:  # a hello of several records, which nobody needs
            return None, refusals.BROKEN
        service = self._services.get(name)
        return service, "" if service else refusals.UNKNOWN_SERVICE

    def _forget(self, port: int, visit: Visit) -> None:
        if self._visits.get(port) is visit:
            del self._visits[port]

    async def _send(
        self, visit: Visit, limits: Limits, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: int
    ) -> None:
        """Pass on what comes, until it ends or is too much."""
        while sent <= limits.sent or visit.stays:
            chunk = await reader.read(_STAYING_BYTES if visit.stays else _CHUNK_BYTES)
            if not chunk:
                return
            sent += len(chunk)
            writer.write(chunk)
            with suppress(OSError):  # the server has ended it, which the other direction reports
                await writer.drain()
        visit.refused = refusals.OVERSIZE

    async def _receive(
        self, visit: Visit, limits: Limits, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass back what the server answers, until it ends."""
        while chunk := await _next(reader, _STAYING_BYTES if visit.stays else _CHUNK_BYTES):
            visit.greeted = visit.greeted or chunk[0] == _HANDSHAKE
            writer.write(chunk)
            await writer.drain()
        visit.refused = limits.silent if visit.greeted else refusals.BROKEN
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _next(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """What the server sends next; nothing if it has ended or reset the connection."""
    try:
        return await reader.read(most_bytes)
    except OSError:
        return b""


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _first_of(*parts: Awaitable[None]) -> None:
    """Wait for the first of these to end; cancel the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MEMBER_LIMITS = Limits(10.0, 2**18, refusals.UNCERTIFIED)
"""Of who has not yet proved to be a member of the run."""


def _bound(listen: Address) -> socket.socket:
    host, port = listen
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(
            f"listening on {host}:{port}",
            got=_cause(error),
            expected="an address of this machine, and a port that is free",
            remedy="Give another one; port 0 is any free port.",
        ) from error


def _cause(error: Exception) -> str:
    """What the system says, without what asyncio and socket add."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
