"""What a worker brings to the transport `grpc`: its credentials, where it meets the others, and gRPC with its options.

gRPC is imported in the worker's own process: a process that has used it must not fork.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

from roundelay import env
from roundelay.optional_packages import optional
from roundelay.transport.envelope import HEADER_BYTES, PIECE_BYTES
from roundelay.transport.meeting import Meeting
from roundelay.trust.authority import Credentials
from roundelay.trust.certificates import domain_of
from roundelay.trust.invitation import Address

LOOPBACK = "127.0.0.1"

HELLO_S = 5.0
"""Seconds that whoever connects has to say who it is."""

SILENT_MS = 3500
"""Milliseconds that a ping's answer may take: later than the launcher notices that a worker is stopped, and says so.

Without `grpc.http2.ping_timeout_ms` it would be a minute."""

OPTIONS = {
    "grpc.max_receive_message_length": PIECE_BYTES + HEADER_BYTES,
    "grpc.keepalive_time_ms": 1000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.min_ping_interval_without_data_ms": 500,  # else the server cuts a stream that is idle but pinged
    "grpc.server_handshake_timeout_ms": 1000 * int(HELLO_S),
    "grpc.so_reuseport": 0,
    "grpc.enable_http_proxy": 0,
}

NEEDED = ("transport grpc", "roundelay[join]", ", or choose another transport.")
_QUIET = ("GRPC_VERBOSITY", "NONE")


def name_of(worker: int) -> str:
    """The name in a worker's certificate, unless another machine has had its place before."""
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
        credentials: by which this worker and the others prove who they are.
        meeting: where those that serve write their addresses.
        generation: of the run; what is of another is refused.
        service: the endpoint's name among those of this worker that are behind one front; empty: it is the only one.
        silent_ms: milliseconds that a ping's answer may take.
        refuse: called in the loop's thread with the peer, an address or a worker's name, and one of :data:`REASONS`.
        front: what listens before the endpoint; None: nothing does.
        host: the address at which the endpoint listens if nothing does before it.
        names: in the certificates of all workers; empty: `name_of` each.
    """

    credentials: Credentials
    meeting: Meeting
    generation: int = 0
    service: str = ""
    silent_ms: int = SILENT_MS
    refuse: Callable[[str, str], None] | None = None
    front: Front | None = None
    host: str = LOOPBACK
    names: tuple[str, ...] = ()

    def name(self, worker: int) -> str:
        """The name in a worker's certificate."""
        return self.names[worker] if self.names else name_of(worker)

    def server(self, worker: int) -> str:
        """The name by which a worker's endpoint is asked for, which its certificate has."""
        return f"{self.service}.{domain_of(self.name(worker))}" if self.service else self.name(worker)

    def options(self) -> dict[str, int]:
        """Options of the member's servers and channels."""
        return OPTIONS | {"grpc.keepalive_timeout_ms": self.silent_ms, "grpc.http2.ping_timeout_ms": self.silent_ms}


def load_grpc() -> Any:
    """Return the module ``grpc``, with ``grpc.aio``; it prints nothing of its own.

    Raises:
        UsageError: it is not installed.
    """
    env.set_default(*_QUIET)
    optional("grpc.aio", *NEEDED)
    return optional("grpc", *NEEDED)
