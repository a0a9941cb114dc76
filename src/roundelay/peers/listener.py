"""Listens before a gRPC server, which does not report what fails below a call, and passes on what looks like TLS.

It bounds the number of connections, in all and of one network, how long one may last and how much may come over it, and
reports each connection that the server cuts before it has answered or refused a call. Bytes pass unread: it has no key.
Who has proved to the server who it is may stay: nothing of this bounds it any more.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from roundelay.errors import UsageError
from roundelay.membership.roster import network_of
from roundelay.peers import refusals
from roundelay.trust.invitation import Address

LOOPBACK = "127.0.0.1"

MOST, MOST_OF_NETWORK = 64, 16
"""Most connections at one time, in all and of one network."""

FORGET_S = 2.0
"""Seconds that a connection that has ended is remembered: the server may still be about to read from it."""

_HANDSHAKE = 0x16  # first byte of a record of TLS that carries a handshake
_CHUNK_BYTES, _STAYING_BYTES = 4096, 2**18
"""Most bytes that are read at one time, from strangers and from who stays."""


@final
@dataclass(slots=True)
class Visit:
    """One connection.

    Args:
        address: from where it comes.
        port: the port there.
        settled: whether a call was answered or refused.
        greeted: whether the server has taken up TLS.
        refused: why the connection was cut by the listener; empty if it was not.
        stays: whether it may last.
        until: ends it where it may not.
    """

    address: str
    port: int
    settled: bool = False
    greeted: bool = False
    refused: str = ""
    stays: bool = False
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
class Listener:
    """Accepts connections, and passes each on to a port of this host. Its methods belong to one event loop.

    Args:
        limits: of a connection.
        refuse: is called with the peer and one of :data:`roundelay.peers.refusals.DOOR_REASONS`.
    """

    def __init__(self, limits: Limits, refuse: Callable[[str, str], None]) -> None:
        self._limits, self._refuse = limits, refuse
        self._visits: dict[int, Visit] = {}  # by the port from which the server sees the connection come
        self._networks: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._target = 0

    async def open(self, listen: Address, target: int) -> Address:
        """Listen on one address, port 0 for any, and pass on to port `target`; return where it listens.

        Raises:
            UsageError: it cannot listen there.
        """
        self._target = target
        self._server = await asyncio.start_server(self._accept, sock=_bound(listen), limit=_STAYING_BYTES)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Cut all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    def stay(self, peer: str) -> None:
        """Let the connection last that the server knows as `peer`: it has proved whose it is."""
        visit = self.visit_of(peer)
        visit.settled = True
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
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._leave(task, visit, writer))

    def _leave(self, task: asyncio.Task[None], visit: Visit, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        if not visit.stays:
            self._networks -= Counter({network_of(visit.address): 1})
        self._tasks.discard(task)

    async def _attend(self, visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._limits.seconds) as visit.until:
                await self._pass_on(visit, reader, writer)
        except TimeoutError:
            visit.refused = visit.refused or refusals.SLOW
        except OSError:  # it has left
            pass
        if visit.refused and not visit.settled:
            self._refuse(visit.peer, visit.refused)

    async def _pass_on(self, visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(_CHUNK_BYTES)
        if first and first[0] != _HANDSHAKE:
            visit.refused = refusals.PLAINTEXT
        if not first or visit.refused:
            return
        inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, self._target)
        port = inner_writer.get_extra_info("sockname")[1]
        self._visits[port] = visit
        try:
            inner_writer.write(first)
            await _first_of(
                self._send(visit, reader, inner_writer, len(first)), self._receive(visit, inner_reader, writer)
            )
        finally:
            inner_writer.transport.abort()
            asyncio.get_running_loop().call_later(FORGET_S, self._forget, port, visit)

    def _forget(self, port: int, visit: Visit) -> None:
        if self._visits.get(port) is visit:
            del self._visits[port]

    async def _send(self, visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: int) -> None:
        """Pass on what comes, until it ends or is too much."""
        while sent <= self._limits.sent or visit.stays:
            chunk = await reader.read(_STAYING_BYTES if visit.stays else _CHUNK_BYTES)
            if not chunk:
                return
            sent += len(chunk)
            writer.write(chunk)
            with suppress(OSError):  # the server has ended it, which the other direction reports
                await writer.drain()
        visit.refused = refusals.OVERSIZE

    async def _receive(self, visit: Visit, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass back what the server answers, until it ends."""
        while chunk := await _next(reader, _STAYING_BYTES if visit.stays else _CHUNK_BYTES):
            visit.greeted = visit.greeted or chunk[0] == _HANDSHAKE
            writer.write(chunk)
            await writer.drain()
        visit.refused = self._limits.silent if visit.greeted else refusals.BROKEN
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _next(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """What the server sends next; nothing if it has ended or reset the connection."""
    try:
        return await reader.read(most_bytes)
    except OSError:
        return b""


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


def member_front(refuse: Callable[[str, str], None]) -> Listener:
    """What listens before a port that only members of a run may use."""
    return Listener(MEMBER_LIMITS, refuse)


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
            remedy="Give another one; 0.0.0.0 is every IPv4 address of this machine, port 0 any free port.",
        ) from error


def _cause(error: Exception) -> str:
    """What the system says, without what asyncio and socket add."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
