"""A machine on which all is well, to be spoiled by one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roundelay.doctor import Finding, Machine, examine
from roundelay.doctor.machine import Cores, Memory, Space, Torch
from roundelay.env import MALLOC

GIB = 1 << 30

WELL = Machine(
    python=(3, 11, 7),
    commands_error="",
    torch=Torch(version="2.13.0+cpu", distributed=True, gloo=True),
    packages={"tensorboard": "2.21.0", "transformers": "5.23.0"},
    compiler="/usr/bin/g++",
    glibc="glibc 2.36",
    settings=dict(MALLOC),
    launched=None,
    launch_error=None,
    interfaces=("lo", "eth0"),
    cpu="A processor",
    cores=Cores(total=8, allowed=8, quota=None),
    memory=Memory(total=32 * GIB, available=20 * GIB, limit=None),
    driver=False,
    fork=True,
    fork_error="",
    loopback_error="",
    shm=Space(path="/dev/shm", total=16 * GIB, free=16 * GIB, writable=True),
    folder=Space(path="/home/me", total=100 * GIB, free=50 * GIB, writable=True),
    files=1024,
    processes=None,
)


def spoiled(**changes: Any) -> Machine:
    """The machine with fields replaced; `torch` may be given as the fields of it that change."""
    if isinstance(changes.get("torch"), dict):
        changes["torch"] = replace(WELL.torch, **changes["torch"])
    return replace(WELL, **changes)


def findings(machine: Machine) -> dict[str, Finding]:
    """The findings by name."""
    return {finding.name: finding for finding in examine(machine)}
