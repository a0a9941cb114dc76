"""Measure a machine's profile: with workers of the runtime's own over the transport that is asked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import psutil
import torch

from roundelay.calibration.fixed_costs import FixedCosts, fixed_costs
from roundelay.calibration.measuring import Measurements
from roundelay.calibration.operators import BURSTS, CALL, operators
from roundelay.calibration.sweep import SECONDS, Effort, Sweep, check_measurable, shape_of
from roundelay.cores import threads_each
from roundelay.errors import UsageError
from roundelay.launching.forked_call import check_transport
from roundelay.launching.launch import run
from roundelay.launching.launched_worker import run_follower
from roundelay.launching.rendezvous import ProcessGroup
from roundelay.planner.cost_curve import NOTHING, Curve
from roundelay.planner.machine_profile import (
    FORMAT,
    ExchangeCosts,
    MachineProfile,
    Memory,
    MessageCosts,
    OperatorCosts,
)
from roundelay.planning.machine_profiles import machine_here
from roundelay.runtime.processes.determinism import deterministic
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.worker import unchanged

Tell = Callable[[str], None]
"""Called with a line on what has been measured."""

_DIGITS = 4

Rows = Mapping[int, Sequence[Sequence[float]]]
"""By step, for each sweep seconds and CPU seconds, or those of a forward and a backward."""


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
        transport: ``memory``, ``shm`` or ``gloo``.
        threads: intra-op threads of each worker; by default the workers share the machine's cores.
        seconds: after which no further sweep over all measurements begins; there are four at least.
        tell: called with a line after each sweep.

    Raises:
        UsageError: there cannot be such workers.
        RunError: a worker failed.
    """
    sweep = sweep_for(workers, transport, threads, Effort(seconds))
    check_transport(transport)
    return measured(sweep, tell)


def sweep_for(workers: int, transport: str, threads: int | None, effort: Effort) -> Sweep:
    """What is measured with such workers.

    Raises:
        UsageError: there cannot be such workers.
    """
    check_measurable(transport)
    for name, value in (("workers", workers), ("threads", threads), ("seconds", effort.seconds)):
        if value is not None and not (math.isfinite(value) and value >= (0 if name == "seconds" else 1)):
            raise UsageError(name, got=str(value), expected="a positive number", remedy=f"Correct {name}.")
    each = threads_each(workers, torch.get_num_threads) if threads is None else threads
    return Sweep(workers, transport, each, effort, len(operators(effort)), tuple(BURSTS))


def measured(
    sweep: Sweep, tell: Tell = lambda line: None, process_group: ProcessGroup | None = None, hosts: int = 1
) -> MachineProfile:
    """Measure all that a sweep has, and what a run's own steps cost.

    Args:
        sweep: what to measure.
        tell: called with a line after each sweep.
        process_group: the launcher's processes, if one has started this process; this one leads them.
        hosts: on so many hosts.
    """
    rows: dict[int, Rows] = {}

    def take(report: Report) -> None:
        if report.kind == "finished":
            rows[report.worker] = {int(number): of_step for number, of_step in report.data["rows"].items()}
        elif report.kind == "progress":
            tell(f"sweep {report.data['sweeps']}, after {report.data['seconds']:.1f} s")

    with deterministic(False, threads=sweep.threads):
        run(Measurements(works=sweep.works(), sweep=sweep), take, None, process_group)
    tell("instructions, segments and boxes")
    costs = fixed_costs(sweep.transport, sweep.workers, sweep.threads)
    return _Results(sweep, rows).profile(costs, hosts)


def follow(sweep: Sweep, process_group: ProcessGroup) -> int:
    """Measure as one of a launcher's processes that another leads; returns the exit code.

    Raises:
        WorkerLostError: the leader is lost.
    """
    with deterministic(False, threads=sweep.threads):
        return run_follower(Measurements(works=sweep.works(), sweep=sweep), process_group, unchanged)


@dataclass(frozen=True, slots=True)
class _Results:
    """What was measured: for each worker its rows."""

    sweep: Sweep
    rows: Mapping[int, Rows]

    def profile(self, costs: FixedCosts, hosts: int) -> MachineProfile:
        """The profile that follows from it."""
        sweep = self.sweep
        own = self._operators()
        call = next(one for one in own if one.kind == CALL)
        copies = [(s.size, self._median(n)) for n, s in enumerate(sweep.steps) if s.what == "copy"]
        return MachineProfile(
            format=FORMAT,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            **machine_here(),
            hosts=hosts,
            transport=sweep.transport,
            workers=sweep.workers,
            threads=sweep.threads,
            call_s=call.forward(0),
            instruction_s=_rounded(costs.instruction_s),
            message_instruction_s=_rounded(costs.message_instruction_s),
            segment_s=_rounded(costs.segment_s),
            box_s=_rounded(costs.box_s),
            together={kind: self._together(kind) for kind in sweep.classes},
            messages=self._messages(),
            exchanges=tuple(self._exchanges()),
            operators=tuple([one for one in own if one is not call]),
            memory=Memory(bytes=psutil.virtual_memory().total, copy=_curve(copies)),
        )

    def _median(self, step: int, column: int = 0, workers: Iterable[int] = (0,)) -> float:
        """Mean over workers of the median over all sweeps but the first."""
        return statistics.fmean(
            statistics.median(row[column] for row in self.rows[worker][step][1:]) for worker in workers
        )

    def _numbers(self, what: str, kind: str = "", group: int | None = None) -> list[int]:
        steps = enumerate(self.sweep.steps)
        return [n for n, s in steps if s.what == what and s.kind == kind and group in (None, s.group)]

    def _messages(self) -> MessageCosts:
        numbers, ends = self._numbers("message"), (0, self.sweep.workers - 1)
        if not numbers:
            return MessageCosts(seconds=NOTHING, cpu=NOTHING)
        sizes = [self.sweep.steps[number].size for number in numbers]
        seconds = zip(sizes, [self._median(number) for number in numbers], strict=True)
        cpu = zip(sizes, [self._median(number, 1, ends) for number in numbers], strict=True)
        return MessageCosts(seconds=_curve(seconds), cpu=_curve(cpu))

    def _exchanges(self) -> Iterable[ExchangeCosts]:
        for kind, group in dict.fromkeys((s.kind, s.group) for s in self.sweep.steps if s.what == "exchange"):
            numbers = self._numbers("exchange", kind, group)
            sizes = [4 * math.prod(shape_of(self.sweep.steps[number])) for number in numbers]
            seconds = zip(sizes, [self._median(number) for number in numbers], strict=True)
            cpu = zip(sizes, [self._median(number, 1, range(group)) for number in numbers], strict=True)
            yield ExchangeCosts(kind=kind, group=group, seconds=_curve(seconds), cpu=_curve(cpu))

    def _operators(self) -> list[OperatorCosts]:
        every = [(self.sweep.steps[n].size, n) for n in self._numbers("operator")]
        known = operators(self.sweep.effort)
        found = []
        for kind, unit in dict.fromkeys((one.kind, one.unit) for one in known):
            numbers = [(known[i].size, number) for i, number in every if known[i].kind == kind]
            forward = _curve((size, self._median(number)) for size, number in numbers)
            back = [(size, self._median(number, 1)) for size, number in numbers]
            backward = _curve(back) if any(seconds for _, seconds in back) else NOTHING
            found.append(OperatorCosts(kind=kind, unit=unit, forward=forward, backward=backward))
        return found

    def _together(self, kind: str) -> float:
        (alone,), (together,) = self._numbers("alone", kind), self._numbers("together", kind)
        return _rounded(self._median(together, 0, range(self.sweep.workers)) / self._median(alone))


def _curve(measured: Iterable[tuple[float, float]]) -> Curve:
    """The curve of what was measured, in a few digits."""
    curve = Curve.fitted(measured)
    points = tuple([(size, _rounded(seconds)) for size, seconds in curve.points])
    return replace(curve, points=points, line_error=_rounded(curve.line_error), error=_rounded(curve.error))


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
