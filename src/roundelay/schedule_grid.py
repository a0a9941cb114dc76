"""Pictures in text: a schedule as a staircase."""

from __future__ import annotations

from dataclasses import replace

from roundelay.ir.action import grid
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import OPCODES
from roundelay.ir.rule import rule_named
from roundelay.lower.emit import schedule_of
from roundelay.lower.verify_schedule import programs_of
from roundelay.simulator import Interval, simulate

_LETTERS = {opcode: OPCODES[opcode].letter for opcode in ("forward", "backward", "backward-weight")}

LEGEND = (
    "F0: forward of micro-batch 0, B0: its backward (where there is W0: the gradients of its inputs, W0 those of its "
    "weights), B0': with the update after it, ·: waiting; in small letters: on the worker's second stage"
)


def staircase(plan: Plan, batches: int) -> str:
    """The plan's schedule as a grid: one row per stage, or per worker with two, and one column per time slot.

    Every forward and every backward, or half of one, takes one slot, messages, updates and data none: the picture shows
    the order and the waiting that the schedule itself asks for, not this machine's times.

    Args:
        plan: the plan.
        batches: full batches to draw.
    """
    even = [
        replace(stage, forward_s=1.0, backward_s=1.0, weights_s=_halved(plan), update_s=0.0) for stage in plan.stages
    ]
    unit = replace(plan, stages=tuple(even), latency_s=0.0, bytes_per_s=1e30, read_s=0.0, backward=_one_slot(plan))
    simulation = simulate(unit, programs_of(unit), stream([plan.micro_batches] * batches))
    whose = "stage" if schedule_of(plan).stages_per_worker == 1 else "worker"
    columns = {}
    for worker in range(plan.num_workers):
        first = plan.stages_of(worker)[0]
        columns[first if whose == "stage" else worker] = _row(simulation.intervals_of(worker), first)
    return grid(columns, max(len(row) for row in columns.values()), whose)


def _one_slot(plan: Plan) -> str:
    """A backward mode without a repeated forward, if the rule has one, so that a backward takes one slot."""
    return next((mode for mode in rule_named(plan.rule).modes if mode != "recompute"), plan.backward)


def _halved(plan: Plan) -> float:
    """A slot for the second half of a backward, where there is one."""
    return 1.0 if schedule_of(plan).halved else 0.0


def _row(intervals: list[Interval], first: int) -> list[str]:
    cells: list[str] = []
    for interval in intervals:
        if interval.opcode in _LETTERS:
            cells += [""] * (round(interval.start_s) - len(cells))
            letter = _LETTERS[interval.opcode]
            cells.append(f"{letter if interval.stage == first else letter.lower()}{interval.g}")
        elif interval.opcode == "update":
            cells[-1] += "'"
    return cells
