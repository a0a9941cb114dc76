"""The one port at which a machine is reached, for servers in any thread."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import final

from roundelay.peers.listener import LOOPBACK, MEMBER_LIMITS, Listener, Service
from roundelay.peers.loop_thread import LoopThread
from roundelay.trust.invitation import Address

OPEN_S = 5.0


@final
class Gate:
    """Listens until it is closed.

    Args:
        loop: where it runs.
        refuse: is called with a peer, and why it was refused.
        listen: address and port; 0 is any free port. Nobody outside of this machine reaches loopback.
        advertised: where others reach it, if not there; port 0 is the one on which it listens.

    Raises:
        UsageError: the address cannot be listened on.
    """

    def __init__(
        self,
        loop: LoopThread,
        refuse: Callable[[str, str], None],
        listen: Address = (LOOPBACK, 0),
        advertised: Address | None = None,
    ) -> None:
        self.loop, self.listener = loop, Listener(refuse)
        here = loop.run(self.listener.open(listen), OPEN_S)
        host, port = advertised or here
        #: where others reach this machine
        self.address: Address = (host, port or here[1])
        #: whether that is no address of one machine
        self.everywhere = advertised is None and ipaddress.ip_address(host).is_unspecified

    async def serve(self, name: str, target: int) -> Address:
        """Pass on to a port of this machine the members who ask for this name; return where they do."""
        self.listener.serve(name, Service(target, MEMBER_LIMITS))
        return self.address

    async def leave(self, name: str) -> None:
        """Cut those who have asked for a name, and pass on no more; called in another loop."""
        await asyncio.wrap_future(self.loop.begin(self.listener.leave(name)))

    def stay(self, peer: str) -> None:
        """Let a connection last, known to its server as `peer`, that has proved whose it is."""
        self.loop.soon(self.listener.stay, peer)

    def settle(self, peer: str) -> str:
        """Return the address of a connection that its server refuses."""
        return self.listener.settle(peer)

    def close(self) -> None:
        """Cut all connections, and accept no more."""
        self.loop.run(self.listener.close(), OPEN_S)
