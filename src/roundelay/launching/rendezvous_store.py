"""The TCPStore of the rendezvous: the launcher's own, or one that worker 0 opens."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from roundelay.detect_launcher import LEADER, Launched
from roundelay.errors import UsageError, WorkerLostError

MEET_S, OPENED_S = 30.0, 300.0
"""Seconds in which the launcher's store must answer, and in which worker 0 must have opened one: it imports torch
first, and its machine may start late."""

_LOOPBACK = "127.0.0.1"


def connect_store(launched: Launched) -> Any:
    """Open a new connection to the store.

    Raises:
        RuntimeError: torch cannot connect.
    """
    patience = timedelta(seconds=OPENED_S if launched.opens_store else MEET_S)
    return dist.TCPStore(launched.host, launched.port, is_master=False, timeout=patience)  # type: ignore[attr-defined]


def open_store(launched: Launched) -> Any:
    """Open the store in worker 0, where the launcher hosts none; it listens on a single address.

    Raises:
        UsageError: the address cannot be bound.
    """
    address = _address(launched)
    try:
        listening = socket.create_server((address, launched.port))
    except OSError as error:
        raise UsageError(
            f"MASTER_PORT {launched.port} at {address}",
            got=f"{error.strerror or error} when worker {LEADER} tried to listen there",
            expected="a free port, at an address of the host of the process with RANK 0",
            remedy="Set MASTER_PORT to another port in all processes; MASTER_ADDR must be the host of RANK 0.",
        ) from error
    return dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK if launched.nodes == 1 else address,
        launched.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _address(launched: Launched) -> str:
    """The address to listen on: loopback for one host, else MASTER_ADDR, or the interface's if that is loopback.

    Kubernetes sets MASTER_ADDR to localhost in the first process.
    """
    if launched.nodes == 1:
        return _LOOPBACK
    try:
        address = socket.gethostbyname(launched.host)
    except OSError as error:
        raise UsageError(
            f"MASTER_ADDR {launched.host}",
            got=f"a name without an address: {error}",
            expected="the name or address of the host of the process with RANK 0",
            remedy="Correct MASTER_ADDR; `getent hosts NAME` shows the address of a name.",
        ) from error
    if not ipaddress.ip_address(address).is_loopback:
        return address
    return _addresses().get(launched.interface or "", address)


def check_interface(launched: Launched) -> None:
    """Reject a network interface that this host does not have.

    Raises:
        UsageError: naming those that it has.
    """
    names: Sequence[str] = [name for _, name in socket.if_nameindex()]
    if launched.nodes == 1 or launched.interface in names:
        return
    others = [name for name in names if name != "lo"]
    raise UsageError(
        f"GLOO_SOCKET_IFNAME={launched.interface}",
        got=f"no such network interface on {socket.gethostname()}",
        expected=f"one of this host that reaches the others: {', '.join(others) or 'there is only lo'}",
        remedy=f"Type `export GLOO_SOCKET_IFNAME={others[0] if others else 'NAME'}` on this host; `ip -brief address` "
        "shows the address of each.",
    )


def _addresses() -> Mapping[str, str]:
    """Map interfaces to their IPv4 addresses."""
    known = psutil.net_if_addrs().items()
    return {name: one.address for name, each in known for one in each if one.family == socket.AF_INET}


def unreachable(launched: Launched, error: Exception) -> WorkerLostError:
    """Return the error for a store that cannot be reached."""
    lines = str(error).splitlines() or [type(error).__name__]
    if launched.opens_store:
        return WorkerLostError(
            f"worker {launched.rank} meeting worker {LEADER} at {launched.host}:{launched.port}",
            got=lines[0],
            expected=f"an answer within {OPENED_S:g} s",
            remedy=f"Check that the process with RANK {LEADER} runs, and that MASTER_ADDR and MASTER_PORT are the same "
            "for all and can be reached from this host.",
        )
    return WorkerLostError(
        f"the launcher's store at {launched.host}:{launched.port}",
        got=lines[0],
        expected=f"an answer within {MEET_S:g} s",
        remedy="Check that the launcher still runs and its rendezvous endpoint can be reached from this host.",
    )
