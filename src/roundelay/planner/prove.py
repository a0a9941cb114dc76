"""Prove a plan by executing its programs on the virtual clock; see :mod:`roundelay.lower.check` for what is proved."""

from __future__ import annotations

from functools import lru_cache

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.check import Fired, check_registers, check_run, lengths, programs_of
from roundelay.sim import Simulation, simulate


@lru_cache(maxsize=256)
def prove(plan: Plan) -> None:
    """Refuse a plan whose programs could stand still, overflow a register, or read a version other than the rule's.

    Raises:
        PlanError: naming the first stage and micro-batch, or what is waited for.
    """
    programs = programs_of(plan)
    for counts in lengths(plan):
        simulation = simulate(plan, programs, stream(counts))
        check_run(plan, counts, fired(simulation))
        workers = simulation.workers
        check_registers(programs, [w.tapes_peak for w in workers], [w.unread_peak for w in workers])


def fired(simulation: Simulation) -> list[list[Fired]]:
    """What each worker's machine fired, in order."""
    return [
        [Fired(i.opcode, i.g, i.version, i.distance) for i in simulation.intervals_of(k)]
        for k in range(len(simulation.workers))
    ]
