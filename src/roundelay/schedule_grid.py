"""Prints a schedule as a text grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roundelay.ir.action import grid
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import OPCODES
from roundelay.ir.rule import rule_named
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_plan
from roundelay.simulator import Interval, simulate

_LETTERS = {opcode: OPCODES[opcode].letter for opcode in ("forward", "backward", "backward-weight")}

_LAYOUT_LEGEND = (
    "1F0: forward of micro-batch 0 on stage 1, 1B0: its backward, 1B0': followed by an update, ·: waiting; numbers of "
    "micro-batches go on from batch to batch"
)
_LEGEND = (
    "F0: forward of micro-batch 0, B0: its backward (if there is a W0: B0 for gradients of inputs, W0 for those of "
    "weights), B0': followed by an update, ·: waiting; lower case: on the worker's other stages"
)


def legend(plan: Plan) -> str:
    """What the cells of :func:`staircase` mean."""
    return _LEGEND if read(plan).form is None else _LAYOUT_LEGEND


def staircase(plan: Plan, batches: int) -> str:
    """Return the plan's schedule as a grid: one row per stage (per worker if it has several), one column per slot.

    It is that of the first replica; the others do the same. In a layout other than the pipeline, every worker has a
    row (Cyclic Data Parallelism, Fig. 1).

    Every forward, every backward, and every half of one takes one slot; messages, updates and data take none. So the
    grid shows the order and the waiting that are due to the schedule itself, not the times of a machine.

    Args:
        plan: the plan.
        batches: number of full batches.
    """
    uniform = [
        replace(stage, forward_s=1.0, backward_s=1.0, weights_s=_halved(plan), update_s=0.0) for stage in plan.stages
    ]
    free: dict[str, Any] = {"latency_s": 0.0, "bytes_per_s": 1e30, "instruction_s": 0.0, "read_s": 0.0}
    exchanges = tuple([replace(one, seconds=0.0, busy_s=0.0) for one in plan.exchanges])
    free["workers"] = tuple([replace(worker, speed=1.0) for worker in plan.workers])
    free["edges"] = tuple([replace(edge, latency_s=0.0, bytes_per_s=0.0) for edge in plan.edges])
    unit = replace(plan, stages=tuple(uniform), exchanges=exchanges, backward=_one_slot(plan), **free)
    simulation = simulate(unit, emit(check_plan(unit)), stream([plan.micro_batches] * batches))
    if read(plan).form is not None:
        laid_out = {k: _cells(plan, simulation.intervals_of(k)) for k in range(plan.num_workers)}
        return grid(laid_out, max(map(len, laid_out.values())), "worker")
    label = "stage" if read(plan).schedule.stages_per_worker == 1 else "worker"
    rows = {}
    for worker in sorted({plan.worker_of(stage) for stage in range(plan.num_stages)}):  # all replicas do the same
        first = plan.stages_of(worker)[0]
        rows[first if label == "stage" else worker] = _row(simulation.intervals_of(worker), first)
    return grid(rows, max(len(row) for row in rows.values()), label)


def _one_slot(plan: Plan) -> str:
    """Return a backward mode that recomputes nothing, if the rule has one, so that a backward takes one slot."""
    return next((mode for mode in rule_named(plan.rule).modes if mode != "recompute"), plan.backward)


def _halved(plan: Plan) -> float:
    """Return the slots of the second half of a backward: 1 if there is one."""
    return 1.0 if read(plan).schedule.halved else 0.0


def _cells(plan: Plan, intervals: list[Interval]) -> list[str]:
    """The cells of a worker in a layout, each an action with its stage and the micro-batch's number in the run."""
    cells: list[str] = []
    for interval in intervals:
        if interval.opcode in _LETTERS:
            cells += [""] * (round(interval.start_s) - len(cells))
            number = interval.g * plan.replicas + plan.holder_of(interval.worker) if plan.replicas > 1 else interval.g
            cells.append(f"{interval.stage}{_LETTERS[interval.opcode]}{number}")
        elif interval.opcode == "update" and cells:
            cells[-1] = cells[-1].removesuffix("'") + "'"
    return cells


def _row(intervals: list[Interval], first: int) -> list[str]:
    cells: list[str] = []
    for interval in intervals:
        if interval.opcode in _LETTERS and not interval.continues:
            cells += [""] * (round(interval.start_s) - len(cells))
            letter = _LETTERS[interval.opcode]
            cells.append(f"{letter if interval.stage == first else letter.lower()}{interval.g}")
        elif interval.opcode == "update":
            cells[-1] += "'"
    return cells
