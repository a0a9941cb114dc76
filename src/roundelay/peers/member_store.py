"""A member's side of the members' service (:mod:`roundelay.peers.members`)."""

from __future__ import annotations

import time
from typing import Any, final

from roundelay.errors import RoundelayError, UsageError, WorkerLostError
from roundelay.peers.import_grpc import import_grpc
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.members import GET, HERE, HOST_NAME, OPEN_S, PIECE_BYTES, PING_MS, PONG_MS, PUT, TAKE
from roundelay.trust.authority import Credentials
from roundelay.trust.invitation import Address, address_text

PROBE_S = 10.0
"""Seconds after which what has come is enough to tell how fast a link is."""

ROUNDS = 5
"""Messages there and back, of which the fastest counts."""

_OPTIONS = {
    "grpc.ssl_target_name_override": HOST_NAME,
    "grpc.max_receive_message_length": PIECE_BYTES + 1024,
    "grpc.enable_http_proxy": 0,
    "grpc.client_idle_timeout_ms": 2**31 - 1,  # the host takes the end of the connection for the member's
    "grpc.keepalive_time_ms": PING_MS,
    "grpc.keepalive_timeout_ms": PONG_MS,
    "grpc.http2.max_pings_without_data": 0,
}


@final
class MemberStore:
    """Calls the members' service of a host.

    Args:
        address: where it listens.
        credentials: of this member.
        name: in its certificate.
        loop: where it runs.

    Raises:
        UsageError: a package is not installed.
    """

    def __init__(self, address: Address, credentials: Credentials, name: str, loop: LoopThread) -> None:
        self._name, self._loop, self._grpc = name, loop, import_grpc()
        self._where = address_text(address)
        self._channel = loop.run(self._open(credentials), OPEN_S)

    def put(self, name: str, text: str) -> None:
        """Leave a text under a name that ends in this member's.

        Raises:
            WorkerLostError: the host is gone.
            UsageError: the host refuses it.
        """
        self._loop.run(self._said(name, text), 2 * OPEN_S)

    def get(self, name: str, deadline_s: float) -> str:
        """Wait for a text, and return it.

        Raises:
            WorkerLostError: it does not come in time, or the host is gone.
        """
        return self._loop.run(self._asked(name, deadline_s), deadline_s + OPEN_S)

    def take(self, name: str, most_bytes: int, deadline_s: float) -> bytes:
        """Wait for bytes that the host leaves for this member, and return them.

        Args:
            name: of the bytes.
            most_bytes: that they may be; memory is taken as they come.
            deadline_s: seconds until which all must be there.

        Raises:
            WorkerLostError: they do not come in time, or the host is gone.
            UsageError: they are more than `most_bytes`.
        """
        return self._loop.run(self._taken(name, most_bytes, deadline_s), deadline_s + OPEN_S)

    def link(self, name: str, size: int, deadline_s: float) -> tuple[float, float]:
        """Measure the link: seconds of a message to the host and back, and bytes per second from there.

        Args:
            name: of bytes that the host has left for this purpose.
            size: how many they are.
            deadline_s: seconds that this may take.

        Raises:
            WorkerLostError: it takes longer, or the host is gone.
        """
        return self._loop.run(self._measured(name, size, deadline_s), deadline_s + OPEN_S)

    def close(self) -> None:
        """Close the channel."""
        self._loop.run(self._channel.close(), OPEN_S)

    # --- the loop's thread

    async def _open(self, own: Credentials) -> Any:
        proving = self._grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        return self._grpc.aio.secure_channel(self._where, proving, options=[*_OPTIONS.items()])

    async def _said(self, name: str, text: str) -> None:
        await self._call(PUT, f"{name}\0{text}", OPEN_S)

    async def _asked(self, name: str, deadline_s: float) -> str:
        return bytes(await self._call(GET, name, deadline_s)).decode()

    async def _call(self, method: str, words: str, deadline_s: float) -> bytes:
        try:
            answer: bytes = await self._channel.unary_unary(method)(words.encode(), timeout=deadline_s)
        except self._grpc.RpcError as error:
            raise self._explained(error, words.partition("\0")[0], deadline_s) from error
        return answer

    async def _measured(self, name: str, size: int, deadline_s: float) -> tuple[float, float]:
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            await self._call(GET, HERE, OPEN_S)
            times.append(time.perf_counter() - start)
        try:
            call = self._channel.unary_stream(TAKE)(name.encode(), timeout=deadline_s)
            at, came, started = 0.0, 0, False
            async for piece in call:
                now = time.perf_counter()
                if started and now - at > PROBE_S:
                    call.cancel()
                    break
                came += len(piece) if started else 0
                if not started and len(piece) == PIECE_BYTES:  # the first ones open the window
                    started, at = True, now
                size -= len(piece)
            seconds = max(1e-6, time.perf_counter() - at)
        except self._grpc.RpcError as error:
            raise self._explained(error, name, deadline_s) from error
        return min(times), max(1.0, came / seconds)

    async def _taken(self, name: str, most_bytes: int, deadline_s: float) -> bytes:
        pieces, size = bytearray(), -1
        try:
            call = self._channel.unary_stream(TAKE)(name.encode(), timeout=deadline_s)
            async for piece in call:
                if size < 0:
                    size = int.from_bytes(piece[:8], "little")
                else:
                    pieces += piece
                if size > most_bytes or len(pieces) > size:
                    call.cancel()
                    raise UsageError(
                        f"{name} from the host",
                        got=f"{max(size, len(pieces)):,} bytes",
                        expected=f"at most {most_bytes:,}",
                        remedy="Give a larger --memory-limit if you trust this host, and have the memory.",
                    )
        except self._grpc.RpcError as error:
            raise self._explained(error, name, deadline_s) from error
        if len(pieces) != size:
            raise self._gone(f"{len(pieces)} of {size} bytes of {name}")
        return bytes(pieces)

    def _explained(self, error: Any, what: str, deadline_s: float) -> RoundelayError:
        code = self._grpc.StatusCode
        if error.code() is code.PERMISSION_DENIED:
            remedy = "Ask for a new invitation."
            return UsageError(f"{what} of {self._name}", got=error.details(), expected="to be let in", remedy=remedy)
        if error.code() is code.DEADLINE_EXCEEDED:
            return self._gone(f"no {what} within {deadline_s:g} s")
        if error.code() is code.UNAVAILABLE:
            return self._gone("no answer: it has ended, or the connection to it broke")
        return self._gone(str(error.details() or error.code().name))

    def _gone(self, got: str) -> WorkerLostError:
        return WorkerLostError(
            f"host at {self._where}",
            got=got,
            expected="a host that goes on until the run has ended",
            remedy="Check the output of the host, and the network between.",
        )
