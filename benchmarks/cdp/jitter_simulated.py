"""The simulated benchmark of jitter: steps, waiting, and use of links, on the simulator's clock.

A plan of N equal stages on N workers. A stage's gradients take a share c of a time step on a link. Messages of
different channels do not slow each other down, nor do exchanges; what they would share is what the use of links tells.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.cdp.jitter_durations import Factors, Variation, counted, factor_of, factors, own_means, step_s
from roundelay.actor.machine import Run
from roundelay.comparison.cyclic_costs import chain
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.ir.program import SUMS, Program
from roundelay.lower.channels import channels_of, exchanges_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.simulator import Interval, Simulation, Vary, simulate


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation.

    Args:
        size: N.
        rule: update rule.
        transfer: c, the share of a time step that a stage's gradients take on a link.
        variation: of durations.
        batches: of the run.
        seed: of durations.
    """

    size: int
    rule: str
    transfer: float
    variation: Variation
    batches: int
    seed: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What a simulation came to.

    Args:
        step: of 2N time steps.
        floor: the slowest worker's own mean, of 2N time steps.
        waiting: share of the time in which workers do not compute.
        link: most bytes that a worker begins to send within one time step, of a stage's.
        network: most bytes that all begin to send within one time step, of a stage's on every worker.
    """

    step: float
    floor: float
    waiting: float
    link: float
    network: float


def measure(case: Case) -> Measured:
    """Simulate, and measure the batches that count."""
    plan = plan_of(case.size, case.rule, case.transfer)
    varied = factors(case.variation, case.size, case.batches, case.seed)
    run = run_of(plan, varied)
    step = step_of(run, case.batches)
    own = own_means(varied)
    link, network = _peaks(plan, run, counted(case.batches))
    return Measured(step, max(own), 1.0 - statistics.fmean(own) / step, link, network)


def plan_of(size: int, rule: str, transfer: float = 0.0) -> Plan:
    """N equal stages on N workers, each of which has a replica."""
    plan = chain(size, layout="dp", rule=rule, replicas=size)
    return replace(plan, bytes_per_s=plan.stages[0].parameter_bytes / transfer) if transfer else plan


def run_of(plan: Plan, varied: Factors) -> Simulation:
    """Simulate a plan whose forwards and backwards take so many time steps."""
    return simulate(plan, _programs(plan.num_stages, plan.rule), stream([1] * len(varied)), vary=_varying(varied))


def step_of(run: Simulation, batches: int) -> float:
    """The time of a step, of 2N time steps."""
    own: dict[int, list[Interval]] = defaultdict(list)
    for interval in run.intervals:
        own[interval.worker].append(interval)
    return step_s(own.values(), batches) / (2 * len(own))


@functools.cache
def _programs(size: int, rule: str) -> Sequence[Program]:
    return emit(read(plan_of(size, rule)))


@functools.cache
def _sizes(size: int, rule: str) -> dict[int, dict[int, int]]:
    """Bytes that each worker sends on a channel of gradients; the other channels stay within a worker, or are free."""
    plan = plan_of(size, rule)
    reading = read(plan)
    channels = channels_of(reading)
    exchanged, sizes = exchanges_of(reading, channels), {}
    for channel in channels:
        holders = [port.worker for port in channel.sources]
        if channel.phases:
            sent = [sum(exchanged[channel.id].bytes_sent(size, position)) for position in range(size)]
            sizes[channel.id] = dict(zip(holders, sent, strict=True))
        elif channel.kind in SUMS:
            sizes[channel.id] = {holders[0]: plan.stages[channel.sources[0].stage].parameter_bytes}
    return sizes


def _varying(varied: Factors) -> Vary:
    def vary(worker: int, run: Run, seconds: float) -> float:
        return seconds * factor_of(varied, worker, run) if seconds else 0.0

    return vary


Sent = tuple[float, int]
"""When a worker begins to send, and bytes."""


def _peaks(plan: Plan, run: Simulation, batches: range) -> tuple[float, float]:
    """Most bytes that one worker, and all together, begin to send within one time step."""
    own = _sent(plan, [interval for interval in run.intervals if interval.g in batches])
    stage = plan.stages[0].parameter_bytes
    network = most_within([sent for of_worker in own.values() for sent in of_worker])
    return max(map(most_within, own.values())) / stage, network / (stage * plan.num_workers)


def _sent(plan: Plan, intervals: Iterable[Interval]) -> dict[int, list[Sent]]:
    """What each worker sends; an exchange begins when its last holder has come to it."""
    sizes = _sizes(plan.num_stages, plan.rule)
    begun: dict[tuple[int, int], float] = {}
    for interval in intervals:
        for number in sizes.keys() & interval.gives:
            begun[number, interval.g] = max(begun.get((number, interval.g), 0.0), interval.end_s)
    own: dict[int, list[Sent]] = defaultdict(list)
    for (number, _), start_s in begun.items():
        for worker, size in sizes[number].items():
            own[worker].append((start_s, size))
    return own


def most_within(sent: Iterable[Sent], window_s: float = 1.0) -> int:
    """Most bytes whose sending begins within so many seconds."""
    ordered = sorted(sent)
    first = held = most = 0
    for moment, size in ordered:
        held += size
        while ordered[first][0] <= moment - window_s:
            held -= ordered[first][1]
            first += 1
        most = max(most, held)
    return most
