"""Lets the system end connections to a host that has gone silent: one without power, or behind a cut cable.

A process that is silent may be healthy: a library may hold its interpreter, and all its threads, for half a minute. Its
system acknowledges what arrives all the while. So what ends a connection is a message that is not acknowledged in time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

UNACKNOWLEDGED_S = 7.0
"""Seconds after which a connection ends whose other host does not acknowledge what was sent."""


@contextmanager
def ending_unacknowledged(seconds: float = UNACKNOWLEDGED_S) -> Iterator[None]:
    """Let the system end the TCP connections that this process opens in the context, if one is not acknowledged.

    Something must be sent on a connection, such as a heartbeat; else nothing is to be acknowledged. No other thread may
    open connections meanwhile. Systems other than Linux end them after minutes only.

    Args:
        seconds: without an acknowledgement.
    """
    before = _connections()
    yield
    opened = _connections() - before if hasattr(socket, "TCP_USER_TIMEOUT") else set[tuple[int, object]]()
    for descriptor, _ in opened:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:  # it may be closed by now
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


def _connections() -> set[tuple[int, object]]:
    """File descriptor and addresses of each of this process's TCP connections."""
    known = psutil.Process().net_connections("tcp")
    return {(each.fd, (each.laddr, each.raddr)) for each in known if each.status == psutil.CONN_ESTABLISHED}
