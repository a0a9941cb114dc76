"""Measure a machine's profile: with workers of the runtime's own over the transport that is asked for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

import psutil
import torch

from roundelay.calibration import SECONDS
from roundelay.calibration.fixed_costs import fixed_costs
from roundelay.calibration.measuring import Measurements
from roundelay.calibration.sweep import BURSTS, Sweep
from roundelay.cores import threads_each
from roundelay.errors import UsageError
from roundelay.ir.transports import transport_named
from roundelay.launching.forked_call import check_transport
from roundelay.launching.launch import run
from roundelay.launching.launched_worker import run_follower
from roundelay.launching.process_group import ProcessGroup
from roundelay.planner.cost_curve import Curve
from roundelay.planner.machine_profile import FORMAT, LinkCosts, MachineProfile, OperatorCosts
from roundelay.planning.machine_profiles import machine_here
from roundelay.runtime.processes.determinism import deterministic
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.workload import unchanged

Tell = Callable[[str], object]
"""Called with a line on what has been measured."""

Rows = dict[int, dict[str, list[list[float]]]]
"""What each worker has measured: by step, a row for each sweep."""


def calibrate(
    *,
    workers: int = 2,
    transport: str = "memory",
    threads: int | None = None,
    seconds: float = SECONDS,
    tell: Tell = lambda line: None,
) -> MachineProfile:
    """Measure what messages, exchanges, instructions and operators cost on this machine.

    Args:
        workers: how many; exchanges are measured in groups of two, four and so on, and of all.
        transport: ``memory``, ``shm``, ``gloo`` or ``grpc``.
        threads: intra-op threads of each worker; by default the workers share the machine's cores.
        seconds: after which no further sweep over all measurements begins; there are four at least.
        tell: called with a line after each sweep.

    Raises:
        UsageError: there cannot be such workers.
        RunError: a worker failed.
    """
    return measured(sweep_with(workers, transport, threads, seconds), tell)


def sweep_with(workers: int, transport: str, threads: int | None, seconds: float) -> Sweep:
    """What is measured with such workers; arguments and errors as of :func:`calibrate`."""
    each = threads_each(workers, torch.get_num_threads) if threads is None else threads
    fits = "cpu" in transport_named(transport).devices and 0 <= seconds < math.inf
    if not fits or workers < 1 or each < 1:
        raise UsageError(
            "what to measure",
            got=f"workers {workers}, transport {transport}, threads {each}, seconds {seconds:g}",
            expected="workers on the CPU, over memory, shm, gloo or grpc, and positive numbers",
            remedy="Correct what does not fit.",
        )
    return Sweep(workers, transport, each, seconds)


def measured(
    sweep: Sweep, tell: Tell = lambda line: None, process_group: ProcessGroup | None = None, hosts: int = 1
) -> MachineProfile:
    """Measure.

    Args:
        sweep: what.
        tell: called with a line after each sweep.
        process_group: the launcher's processes, if one has started this process; this one leads them.
        hosts: on so many hosts.
    """
    if process_group is None:
        check_transport(sweep.transport)
    rows: Rows = {}

    def take(report: Report) -> None:
        if report.kind == "finished":
            rows[report.worker] = report.data["rows"]
        elif report.kind == "progress":
            tell(f"sweep {report.data['sweeps']}, after {report.data['seconds']:.1f} s")

    with deterministic(False, threads=sweep.threads):
        run(Measurements(works=sweep.works(), sweep=sweep), take, None, process_group)
    tell("instructions, segments and boxes")
    return profile_of(sweep, rows, fixed_costs(sweep.transport, sweep.workers, sweep.threads), hosts)


def follow(sweep: Sweep, process_group: ProcessGroup) -> int:
    """Measure as one of a launcher's processes that another leads; returns the exit code.

    Raises:
        WorkerLostError: the leader is lost.
    """
    with deterministic(False, threads=sweep.threads):
        return run_follower(Measurements(works=sweep.works(), sweep=sweep), process_group, unchanged)


def profile_of(sweep: Sweep, rows: Rows, costs: Mapping[str, float], hosts: int) -> MachineProfile:
    """The profile that follows from what was measured: of each step the mean over workers of the median over sweeps.

    Args:
        sweep: what was measured.
        rows: of each worker.
        costs: seconds of what a run does beside, by name.
        hosts: on so many hosts.
    """
    points = defaultdict(list)
    for number, step in enumerate(sweep.steps):
        own = [rows[worker][str(number)][1:] for worker in sweep.members(step)]  # the first warms up
        for column in range(len(own[0][0])):
            seconds = fmean(median(row[column] for row in of_worker) for of_worker in own)
            points[step.what, step.kind, step.group, column].append((step.size, seconds))
    curves = {key: _fitted(measured) for key, measured in points.items()}
    beside: dict[str, Any] = {name: _rounded(seconds) for name, seconds in costs.items()}
    units = {step.kind: step.operator.unit for step in sweep.steps if step.operator is not None}
    links, ops = [], []
    for (what, kind, group, column), curve in curves.items():
        if what == "link" and column == 0:
            links.append(LinkCosts(kind=kind, group=group, seconds=curve, cpu=curves[what, kind, group, 1]))
        elif what == "operator":
            ops.append(OperatorCosts(kind=kind + "-backward" * column, unit=units[kind], seconds=curve))
    return MachineProfile(
        format=FORMAT,
        made=datetime.now(UTC).replace(microsecond=0),
        **machine_here(),
        memory_bytes=psutil.virtual_memory().total,
        hosts=hosts,
        transport=sweep.transport,
        workers=sweep.workers,
        threads=sweep.threads,
        **beside,
        together={n: _rounded(max(1.0, curves["together", n, 1, 0](0) / curves["alone", n, 1, 0](0))) for n in BURSTS},
        links=tuple(links),
        operators=tuple(ops),
    )


def _fitted(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve of what was measured, in a few digits."""
    curve = Curve.fitted(points)
    rounded = tuple([(size, _rounded(seconds)) for size, seconds in curve.points])
    return replace(curve, points=rounded, line_error=_rounded(curve.line_error), error=_rounded(curve.error))


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
