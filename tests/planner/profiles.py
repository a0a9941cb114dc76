"""A machine's profile as if it had been measured, so that tests of planning need not wait for one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from roundelay.planner.cost_curve import Curve
from roundelay.planner.machine_profile import FORMAT, MESSAGE, SHARED, LinkCosts, MachineProfile, OperatorCosts
from roundelay.planning.machine_profiles import machine_here

MIB = 1 << 20
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", SHARED)


def line(latency_s: float, bytes_per_s: float) -> Curve:
    return Curve(((0, latency_s), (MIB, latency_s + MIB / bytes_per_s)))


def links(kind: str, group: int) -> LinkCosts:
    return LinkCosts(kind=kind, group=group, seconds=line(1e-4 * group, 2e9), cpu=line(3e-5, 8e9))


MEASURED = MachineProfile(
    format=FORMAT,
    made=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    processor="any",
    cores=2,
    torch="any",
    memory_bytes=8 << 30,
    hosts=1,
    transport="shm",
    workers=2,
    threads=1,
    instruction_s=1e-5,
    message_instruction_s=3e-5,
    segment_s=2e-5,
    box_s=5e-5,
    together={"matmul": 1.2, "elementwise": 1.8, "small": 1.1},
    links=(links(MESSAGE, 2), *[links(kind, group) for kind in COLLECTIVES for group in (2, 4, 8)]),
    operators=tuple(
        [
            OperatorCosts(kind=kind, unit="bytes", seconds=line(3e-6, 1e10))
            for kind in ("copy", "call", "elementwise", "adamw")
        ]
    ),
)


def calibrated(**asked: Any) -> MachineProfile:
    """In place of :func:`roundelay.calibration.calibrate.calibrate`."""
    known = {name: asked[name] for name in ("workers", "transport", "threads") if asked.get(name) is not None}
    return replace(MEASURED, **machine_here(), **known)
