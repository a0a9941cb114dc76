"""Judges choices as :mod:`roundelay.planner.check_given` does, and by the devices of this host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundelay.ir.device_names import listed_devices
from roundelay.ir.transports import transport_named
from roundelay.launching.launch import needs_launcher
from roundelay.planner.check_given import check_given
from roundelay.runtime.device import default_devices, resolve_devices


def check_here(given: Mapping[str, Any]) -> None:
    """Check choices, and that this host has the devices on which they would compute.

    Args:
        given: as for :func:`~roundelay.planner.check_given.check_given`.

    Raises:
        PlanError: a choice cannot be used here.
    """
    check_given(given)
    transport = given.get("transport") or "memory"
    devices = given.get("devices") or default_devices(transport)
    resolve_devices(devices, len(listed_devices(devices)) or 1, transport)
    check_given({**given, "devices": devices})


def refuse_launched(transport: str) -> None:
    """Refuse a transport between processes of a launcher, where one process runs everything.

    Raises:
        UsageError: it is one, such as nccl.
    """
    if transport_named(transport).workers == "launched":
        raise needs_launcher()
