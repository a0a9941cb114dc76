"""Judges choices as :mod:`roundelay.planner.check_given` does, and by the devices of this host."""

from __future__ import annotations

from dataclasses import replace

from roundelay.ir.device_names import listed_devices
from roundelay.ir.transports import check_packages, transport_named
from roundelay.launching.launch import needs_launcher
from roundelay.planner.check_given import check_given
from roundelay.planner.plan_options import Choices
from roundelay.runtime.device import default_devices, resolve_devices


def check_here(choices: Choices) -> None:
    """Check choices, and that this host has the devices on which they would compute.

    Raises:
        PlanError: a choice cannot be used here.
        UsageError: a package that the transport needs is not installed.
    """
    check_given(choices)
    transport = choices.transport or "memory"
    check_packages(transport)
    devices = choices.devices or default_devices(transport)
    resolve_devices(devices, len(listed_devices(devices)) or 1, transport)
    check_given(replace(choices, devices=devices))


def refuse_launched(transport: str) -> None:
    """Refuse a transport between processes of a launcher, where one process runs everything.

    Raises:
        UsageError: it is one, such as nccl.
    """
    if transport_named(transport).workers == "launched":
        raise needs_launcher()
