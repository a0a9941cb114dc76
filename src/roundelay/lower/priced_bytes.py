"""The bytes that workers send as a plan prices them, of full micro-batches; single numbers are not counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundelay.ir.program import STATES, SUMS, Instruction, Program
from roundelay.lower.channels import channels_of, exchanges_of
from roundelay.lower.reading import Reading


def message_bytes(reading: Reading) -> dict[int, int]:
    """By channel the bytes of a message, or of what an exchange leaves."""
    plan = reading.plan
    sizes: dict[tuple[str, int, int], int] = {("data", 0, 0): plan.input_bytes}
    for edge in plan.edges:
        sizes["forward", edge.source, edge.target] = edge.forward_bytes
        sizes["gradient", edge.target, edge.source] = edge.backward_bytes
    for k, stage in enumerate(plan.stages):
        sizes |= {(kind, k, k): stage.parameter_bytes for kind in STATES}
    for exchange in plan.exchanges:
        sizes |= {(kind, exchange.stage, exchange.stage): exchange.num_bytes for kind in SUMS if not exchange.phases}
    channels = channels_of(reading)
    found = {c.id: sizes.get((c.kind, c.sources[0].stage, c.targets[0].stage), 0) for c in channels}
    return found | {number: exchange.num_bytes for number, exchange in exchanges_of(reading, channels).items()}


def given_bytes(reading: Reading) -> dict[tuple[int, int], int]:
    """By channel and worker the bytes that it sends to others each time that it gives to the channel."""
    sizes, channels = message_bytes(reading), channels_of(reading)
    exchanges = exchanges_of(reading, channels)
    return {
        (channel.id, port.worker): sum(exchanges[channel.id].bytes_sent(len(channel.sources), position))
        if channel.phases
        else sizes[channel.id] * (not channel.read_by(port.worker))
        for channel in channels
        for position, port in enumerate(channel.sources)
    }


def priced_bytes(reading: Reading, programs: Sequence[Program], batches: int) -> list[int]:
    """For each worker the bytes that it sends in so many batches of M micro-batches.

    Args:
        reading: of the plan.
        programs: one for each worker.
        batches: number of batches.
    """
    given, totals = given_bytes(reading), [0] * len(programs)
    for program in programs:
        for line in program.body:
            times = _times(program, line, reading.plan.micro_batches, batches)
            totals[program.worker] += times * sum(given[channel, program.worker] for channel in line.gives)
    return totals


def _times(program: Program, line: Instruction, size: int, batches: int) -> int:
    """How often a line acts in so many batches of that size."""
    window, windows = (size, batches) if program.over == "batch" else (size * batches, 1)
    every = program.every or 1
    if not line.once_a_batch:
        return windows * len(range(line.offset % every, window, every))
    ends = range(size - 1, size - 1 + size * every, size)
    first = next((g for g in ends if (g - line.offset) % every == 0), window)
    return windows * len(range(first, window, math.lcm(size, every)))
