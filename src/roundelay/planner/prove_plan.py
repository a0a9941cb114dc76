"""Proves a plan: executes its programs on a virtual clock and has :mod:`roundelay.lower.verify_schedule` check them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import product
from zlib import crc32

from roundelay.actor.machine import Run
from roundelay.errors import RoundelayError
from roundelay.ir.device_names import CPU
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan, StagePlan
from roundelay.ir.program import Program
from roundelay.ir.transports import TRANSPORTS
from roundelay.lower.alike_holders import first_holders, run_alike
from roundelay.lower.emit import emit
from roundelay.lower.reading import Reading, read
from roundelay.lower.validate_plan import check_plan
from roundelay.lower.verify_free import check_free_run
from roundelay.lower.verify_schedule import Fired, check_registers, check_run, runs_to_check
from roundelay.simulator import Simulation, simulate
from roundelay.simulator.simulation import Vary


def _as_predicted(worker: int, run: Run, seconds: float) -> float:
    return seconds


def _mixed(seed: int) -> Vary:
    """Seconds up to eight times as long, mixed from the numbers of what takes them."""

    def vary(worker: int, run: Run, seconds: float) -> float:
        return seconds * (1 + crc32(f"{seed} {worker} {run.instruction.opcode} {run.g}".encode()) % 8)

    return vary


VARIED: tuple[Vary, ...] = _as_predicted, _mixed(1), _mixed(2)
"""What instructions take where a plan is proved: as predicted, and, where the order depends on it, otherwise."""


def prove(plan: Plan) -> None:
    """Prove that the plan's programs neither deadlock nor overflow a register, and read the rule's versions.

    Raises:
        PlanError: naming the first stage and micro-batch, or what a deadlocked worker waits for.
    """
    prove_checked(check_plan(plan))


def prove_checked(reading: Reading) -> None:
    """The same of a plan that has been checked."""
    _prove(_without_times(reading.plan))


def _without_times(plan: Plan) -> Plan:
    """Return the plan with uniform times: no proof depends on them, so plans that differ only in them share one."""
    even = StagePlan(
        workers=(),
        segments=(),
        forward_s=1.0,
        backward_s=1.0,
        weights_s=1.0,
        update_s=0.0,
        parameter_bytes=0,
        tape_bytes=0,
        owed_bytes=0,
    )
    return replace(
        plan,
        model="",
        transport=next(iter(TRANSPORTS)),
        deadline_s=1.0,
        latency_s=0.1,
        bytes_per_s=1.0,
        instruction_s=0.0,
        read_s=0.1,
        input_bytes=0,
        workers=tuple(replace(worker, device=CPU, speed=1.0) for worker in plan.workers),
        stages=tuple(replace(even, workers=stage.workers, in_flight=stage.in_flight) for stage in plan.stages),
        edges=tuple(replace(e, forward_bytes=0, backward_bytes=0, latency_s=0.0, bytes_per_s=0.0) for e in plan.edges),
        parameters={},
        exchanges=tuple(replace(one, dtypes=(), shapes=(), seconds=0.0, busy_s=0.0) for one in plan.exchanges),
    )


@lru_cache(maxsize=256)
def _prove(plan: Plan) -> None:
    reading = read(plan)
    programs = emit(reading)
    if reading.form is None and reading.mesh.size > 1:
        first = read(first_holders(plan))
        if run_alike(programs, firsts := emit(first)):
            with suppress(RoundelayError):  # which all workers together tell by their own numbers
                _check(first, firsts)
                return
    _check(reading, programs)


def _check(reading: Reading, programs: Sequence[Program]) -> None:
    for counts, vary in product(runs_to_check(reading), VARIED if reading.free else VARIED[:1]):
        simulation = simulate(reading.plan, programs, stream(counts), vary=vary)
        (check_free_run if reading.free else check_run)(reading, counts, fired(simulation))
        workers = simulation.workers
        check_registers(
            programs,
            [w.tapes_peak for w in workers],
            [w.owed_peak for w in workers],
            [w.unread_peak for w in workers],
            [w.registers_peak for w in workers],
        )


def fired(simulation: Simulation) -> list[list[Fired]]:
    """Return the instructions that each worker's machine fired, in order."""
    executed: list[list[Fired]] = [[] for _ in simulation.workers]
    for i in simulation.intervals:
        own = Fired(i.opcode, i.g, i.version, i.reads, i.distance, i.entry, i.stage, i.of, i.continues)
        executed[i.worker].append(own)
    return executed
