"""The store in which a launcher's processes meet: the launcher's own, or one that worker 0 opens."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from roundelay.errors import UsageError, WorkerLostError
from roundelay.launchers import LEADER, Launched

MEET_S, OPENED_S = 30.0, 300.0
"""Seconds in which the launcher's store must answer, and in which worker 0 must have opened one: it imports torch, too,
and may have to wait for its machine."""

_LOOPBACK = "127.0.0.1"


def connected(place: Launched) -> Any:
    """A connection of its own to the store.

    Raises:
        RuntimeError: it cannot be had; torch's.
    """
    patience = timedelta(seconds=OPENED_S if place.opens_store else MEET_S)
    return dist.TCPStore(place.host, place.port, is_master=False, timeout=patience)  # type: ignore[attr-defined]


def opened(place: Launched) -> Any:
    """The store that worker 0 opens where the launcher keeps none; it listens at one address alone.

    Raises:
        UsageError: the address cannot be listened on.
    """
    address = _address(place)
    try:
        listening = socket.create_server((address, place.port))
    except OSError as error:
        raise UsageError(
            f"MASTER_PORT {place.port} at {address}",
            got=f"{error.strerror or error}, when worker {LEADER} was to listen there",
            expected="a free port, at an address of the host of the process with RANK 0",
            remedy="Set MASTER_PORT to another one, for all processes alike; MASTER_ADDR must be the first's host.",
        ) from error
    return dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK if place.nodes == 1 else address,
        place.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _address(place: Launched) -> str:
    """Where to listen: on loopback for one host; else at MASTER_ADDR, or the interface's address if that is loopback.

    Kubernetes tells the first process that MASTER_ADDR is localhost.
    """
    if place.nodes == 1:
        return _LOOPBACK
    try:
        told = socket.gethostbyname(place.host)
    except OSError as error:
        raise UsageError(
            f"MASTER_ADDR {place.host}",
            got=f"a name without an address: {error}",
            expected="the name or address of the host of the process with RANK 0",
            remedy="Correct MASTER_ADDR; `getent hosts NAME` says what a name stands for.",
        ) from error
    if not ipaddress.ip_address(told).is_loopback:
        return told
    return _addresses().get(place.interface or "", told)


def check_interface(place: Launched) -> None:
    """Refuse a network interface that is not here.

    Raises:
        UsageError: naming those that are.
    """
    names: Sequence[str] = [name for _, name in socket.if_nameindex()]
    if place.nodes == 1 or place.interface in names:
        return
    others = [name for name in names if name != "lo"]
    raise UsageError(
        f"GLOO_SOCKET_IFNAME={place.interface}",
        got=f"no such network interface on {socket.gethostname()}",
        expected=f"one that is here and reaches the other hosts: {', '.join(others) or 'there is only lo'}",
        remedy=f"Type `export GLOO_SOCKET_IFNAME={others[0] if others else 'NAME'}` on this host; `ip -brief address` "
        "shows the address of each.",
    )


def _addresses() -> Mapping[str, str]:
    """Interface to its IPv4 address."""
    known = psutil.net_if_addrs().items()
    return {name: one.address for name, each in known for one in each if one.family == socket.AF_INET}


def unreachable(place: Launched, error: Exception) -> WorkerLostError:
    """Why the store cannot be had."""
    lines = str(error).splitlines() or [type(error).__name__]
    if place.opens_store:
        return WorkerLostError(
            f"worker {place.rank} meeting worker {LEADER} at {place.host}:{place.port}",
            got=lines[0],
            expected=f"an answer within {OPENED_S:g} s",
            remedy=f"See whether the process with RANK {LEADER} runs, and whether MASTER_ADDR and MASTER_PORT are the "
            "same for all and can be reached from this host.",
        )
    return WorkerLostError(
        f"the launcher's store at {place.host}:{place.port}",
        got=lines[0],
        expected=f"an answer within {MEET_S:g} s",
        remedy="See whether the launcher still runs and its rendezvous endpoint can be reached from this host.",
    )
