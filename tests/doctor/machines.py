"""A machine on which every check passes, and copies of it with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roundelay.doctor import Finding, HostFacts, examine
from roundelay.doctor.host import Space, Torch

GIB = 1 << 30

WELL = HostFacts(
    commands_error="",
    torch=Torch(version="2.13.0+cpu", distributed=True, gloo=True),
    compiler="/usr/bin/g++",
    settings={},
    launched=None,
    refused={},
    interfaces=("lo", "eth0"),
    cores=8,
    allowed_cores=8,
    core_quota=None,
    usable_cores=8,
    threads=8,
    memory=32 * GIB,
    free_memory=20 * GIB,
    memory_limit=None,
    driver=False,
    fork_error="",
    loopback_error="",
    shm=Space(path="/dev/shm", total=16 * GIB, free=16 * GIB, writable=True),
    folder=Space(path="/home/me", total=100 * GIB, free=50 * GIB, writable=True),
    files=1024,
    processes=None,
)


def spoiled(**changes: Any) -> HostFacts:
    """The machine with fields replaced; `torch` may be a dict of the fields of it to replace."""
    if isinstance(changes.get("torch"), dict):
        changes["torch"] = replace(WELL.torch, **changes["torch"])
    return replace(WELL, **changes)


def findings(machine: HostFacts) -> dict[str, Finding]:
    """The findings by name."""
    return {finding.name: finding for finding in examine(machine)}
