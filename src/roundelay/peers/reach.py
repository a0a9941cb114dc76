"""Whether a machine that has joined can be reached: the host calls it back before the run is planned."""

from __future__ import annotations

import asyncio
import os
from typing import Any, final

from roundelay.peers.gate import Gate
from roundelay.peers.import_grpc import import_grpc
from roundelay.peers.listener import LOOPBACK, MEMBER_LIMITS, Service
from roundelay.peers.loop_thread import LoopThread
from roundelay.trust.authority import Credentials
from roundelay.trust.certificates import domain_of
from roundelay.trust.invitation import Address, address_text

SERVICE, METHOD = "roundelay.Reach", "Here"
REACH_S = 15.0
"""Seconds in which a machine must answer; a line may still carry what others are measured with."""

_OPTIONS = {"grpc.enable_http_proxy": 0, "grpc.enable_retries": 0, "grpc.so_reuseport": 0}


@final
class Reach:
    """Answers the host until it is closed.

    Args:
        credentials: of this member.
        name: in its certificate.
        gate: the port of this machine, in whose loop it runs.
    """

    def __init__(self, credentials: Credentials, name: str, gate: Gate) -> None:
        self._gate, self._name, self._grpc = gate, _server(name), import_grpc()
        gate.loop.run(self._open(credentials), REACH_S)

    def close(self) -> None:
        """Answer no more."""
        self._gate.loop.run(self._close(), REACH_S)

    async def _open(self, own: Credentials) -> None:
        grpc = self._grpc
        self._server = grpc.aio.server(options=[*_OPTIONS.items()])
        methods = {METHOD: grpc.unary_unary_rpc_method_handler(self._here)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        proving = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, require_client_auth=True)
        port = self._server.add_secure_port(f"{LOOPBACK}:0", proving)
        await self._server.start()
        self._gate.listener.serve(self._name, Service(port, MEMBER_LIMITS))

    async def _close(self) -> None:
        await self._gate.listener.leave(self._name)
        await self._server.stop(None)

    async def _here(self, _: bytes, context: Any) -> bytes:
        self._gate.listener.stay(context.peer())
        return b""


def unreached(address: Address, name: str, credentials: Credentials, loop: LoopThread) -> str:
    """Call a member at an address; return why it does not answer there, empty if it does.

    Args:
        address: that it gives.
        name: in its certificate.
        credentials: of who calls.
        loop: in which to call.
    """
    return loop.run(_called(address, name, credentials), 3 * REACH_S)


async def _called(address: Address, name: str, own: Credentials) -> str:
    grpc = import_grpc()
    proving = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    options = _OPTIONS | {"grpc.ssl_target_name_override": _server(name)}
    async with grpc.aio.secure_channel(address_text(address), proving, options=[*options.items()]) as channel:
        try:
            await channel.unary_unary(f"/{SERVICE}/{METHOD}")(b"", timeout=REACH_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {REACH_S:g} s"
            return await _diagnosed(address)
    return ""


async def _diagnosed(address: Address) -> str:
    """What there is at an address where the member does not answer."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*address), REACH_S)
    except TimeoutError:
        return "no answer: a firewall or a router on the way drops what is sent there"
    except (OSError, ValueError) as error:  # a name that no resolver takes is a ValueError
        number = getattr(error, "errno", None)
        return os.strerror(number) if isinstance(number, int) and number > 0 else str(error)
    writer.close()
    return "somebody else answers there"


def _server(name: str) -> str:
    return f"reach.{domain_of(name)}"
