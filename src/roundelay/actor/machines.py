"""Which machine executes a program."""

from __future__ import annotations

from collections.abc import Mapping

from roundelay.actor.free import FreeMachine
from roundelay.actor.loop import LoopMachine
from roundelay.actor.machine import Machine
from roundelay.ir.program import Program


def machine_for(
    program: Program, first_g: int = 0, first_version: int = 0, in_flight: Mapping[int, int] | None = None
) -> Machine:
    """The machine of a program's order; arguments as of :class:`roundelay.actor.machine.Machine`."""
    made = FreeMachine if program.free else LoopMachine
    return made(program, first_g, first_version, in_flight)
