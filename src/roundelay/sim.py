"""The simulator: the runtime's own machines, driven by a virtual clock instead of threads and sockets.

Times come from the plan: seconds of each stage's forward, backward and update, of reading a micro-batch, a latency and
a rate for every message. What comes out is what would happen, event by event, with the memory it takes: no formula of
its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from roundelay.actor.machine import Machine, Run
from roundelay.actor.reader import Reader
from roundelay.errors import PlanError
from roundelay.ir.load import Load
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.program import Channel, Program


@dataclass(frozen=True, slots=True)
class Interval:
    """One instruction in time: seconds from the start of the run."""

    worker: int
    opcode: str
    g: int
    version: int
    reads: int
    keep: int | None
    distance: int
    entry: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the simulation says of one worker.

    Args:
        busy_s: seconds it computes.
        data_s: seconds it waits for data.
        registers_peak: most registers of data in use at one time.
        tapes_peak: most forwards waiting for their backward at one time.
        owed_peak: most backwards waiting for their weights' half at one time.
        tape_bytes_peak: most bytes that both hold at one time.
        versions_read: smallest and largest distance between the batch of a forward and the version it reads.
        versions_held_peak: most weight versions alive at one time, predicted copies included.
        unread_peak: most messages on the way or unread, for each channel into it.
        unread_bytes_peak: bytes of those.
    """

    busy_s: float
    data_s: float
    registers_peak: int
    tapes_peak: int
    owed_peak: int
    tape_bytes_peak: int
    versions_read: tuple[int, int]
    versions_held_peak: int
    unread_peak: dict[int, int] = field(hash=False)
    unread_bytes_peak: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run.

    Args:
        makespan_s: seconds from the first event to the last.
        intervals: every instruction, ordered by start.
        events: for each worker, its fired instructions as text, in order.
        workers: one report each.
        loads: every batch that a reader loaded, in order; none if that takes no time.
    """

    makespan_s: float
    intervals: tuple[Interval, ...]
    events: tuple[tuple[str, ...], ...]
    workers: tuple[WorkerReport, ...]
    loads: tuple[Load, ...]

    def intervals_of(self, worker: int) -> list[Interval]:
        """What one worker did, in order."""
        return [interval for interval in self.intervals if interval.worker == worker]

    @property
    def bubble(self) -> float:
        """Share of the workers' time in which they do not compute."""
        busy = sum(report.busy_s for report in self.workers)
        return 1.0 - busy / (self.makespan_s * len(self.workers)) if self.makespan_s else 0.0


def simulate(
    plan: Plan,
    programs: Sequence[Program],
    micro_batches: Sequence[MicroBatch],
    in_flight: Sequence[Mapping[int, int]] | None = None,
) -> Simulation:
    """Run ``programs`` on a virtual clock.

    Args:
        plan: its times.
        programs: one per worker, emitted from that plan.
        micro_batches: the data, as headers.
        in_flight: for a run that goes on in mid-flight, what each machine is given; see
            :class:`~roundelay.actor.machine.Machine`.

    Raises:
        PlanError: the programs come to a standstill, or leave messages unread; there is no micro-batch.
    """
    if not micro_batches:
        raise PlanError("a simulation", got="no micro-batch", expected="at least one", remedy="Give one batch or more.")
    clock = _Clock(plan, programs, micro_batches, in_flight or [None] * len(programs))
    clock.run()
    return clock.report()


class _Clock:
    """A heap of (time, order, worker, event)."""

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[Program],
        micro_batches: Sequence[MicroBatch],
        in_flight: Sequence[Mapping[int, int] | None],
    ) -> None:
        self.plan = plan
        self.headers = {header.g: header for header in micro_batches}
        first = micro_batches[0]
        self.machines = [
            Machine(program, first.g, first.batch, flying) for program, flying in zip(programs, in_flight, strict=True)
        ]
        self.readers = {p.worker: Reader(p.worker, p.registers) for p in programs if p.registers}
        self.channels: dict[int, Channel] = {c.id: c for program in programs for c in program.channels}
        self.bytes = _message_bytes(plan, self.channels)
        self.now = 0.0
        self.heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self.pushed = 0
        self.intervals: list[Interval] = []
        self.events: list[list[str]] = [[] for _ in programs]
        self.link_free = dict.fromkeys(self.channels, 0.0)
        self.on_way = dict.fromkeys(self.channels, 0)
        self.on_way_peak = dict.fromkeys(self.channels, 0)

    def run(self) -> None:
        """Until every machine has halted."""
        for worker in range(len(self.machines)):
            self.fire(worker)
        while self.heap:
            self.now, _, worker, happens = heapq.heappop(self.heap)
            happens()
            self.fire(worker)
        stuck = [machine for machine in self.machines if not machine.halted]
        left = [c for machine in self.machines for c, unread in machine.unread.items() if unread]
        if not stuck and left:
            raise PlanError(
                "the programs of the plan",
                got=f"messages left unread on channel {left[0]}",
                expected="every message that is sent to be taken",
                remedy="Report this as a bug of Roundelay, with the plan.",
            )
        if stuck:
            raise PlanError(
                "the programs of the plan",
                got="a standstill: " + "; ".join(f"worker {m.program.worker}: {m.waits_for()}" for m in stuck),
                expected="slots enough for every worker to go on",
                remedy="Raise `slots` of the edges that are waited for.",
            )

    def push(self, delay: float, worker: int, happens: Callable[[], None]) -> None:
        """Something happens to ``worker`` after ``delay`` seconds."""
        self.pushed += 1
        heapq.heappush(self.heap, (self.now + delay, self.pushed, worker, happens))

    def fire(self, worker: int) -> None:
        """What the worker can run now, it runs; that takes its time."""
        run = self.machines[worker].fire()
        if run is None:
            return
        seconds = self.missing_s(worker, run.g) if run.instruction.opcode == "read" else self.seconds(worker, run)
        for channel, _ in run.gives:
            self.on_way[channel] += 1
            self.on_way_peak[channel] = max(self.on_way_peak[channel], self.on_way[channel])
        self.events[worker].append(str(run))
        if run.header is not None:
            self.headers[run.g] = run.header  # as a message of this micro-batch carries it
        entry = run.header.entry if run.header is not None else 0
        weights = run.version, run.reads, run.keep, run.distance, entry
        opcode = run.instruction.opcode
        self.intervals.append(Interval(worker, opcode, run.g, *weights, self.now, self.now + seconds))
        self.push(seconds, worker, partial(self.finish, worker, run))

    def finish(self, worker: int, run: Run) -> None:
        """A run has ended: its messages and grants set out."""
        self.machines[worker].finish(self.headers[run.g] if run.instruction.opcode == "read" else None)
        for number, _ in run.gives:
            channel, target = self.channels[number], self.machines[self.channels[number].target]
            start = max(self.now, self.link_free[number])
            self.link_free[number] = start + self.bytes[number] / self.plan.bytes_per_s
            arrival = self.link_free[number] + self.plan.latency_s
            self.push(arrival - self.now, channel.target, partial(target.arrive, number, self.headers[run.g]))
        for number, _ in run.takes:
            self.on_way[number] -= 1
            source = self.channels[number].source
            self.push(self.plan.latency_s, source, partial(self.machines[source].grant, number))

    def missing_s(self, worker: int, g: int) -> float:
        """Seconds until a micro-batch that is to be read now is in a register."""
        header, reader = self.headers[g], self.readers.get(worker)
        if reader is None:
            raise PlanError(
                f"the program of worker {worker}",
                got="a standstill: `read` without a register",
                expected="registers for what it reads",
                remedy="Report this as a bug of Roundelay, with the plan.",
            )
        return reader.ask(header.batch, self.plan.read_s * header.count, self.now) - self.now

    def seconds(self, worker: int, run: Run) -> float:
        """Predicted seconds of an instruction that computes."""
        stage = self.plan.stages[worker]
        again = stage.forward_s if run.instruction.mode == "recompute" else 0.0
        whole = 0.0 if self.machines[worker].program.owed else stage.weights_s
        times = {
            "forward": stage.forward_s,
            "backward": stage.backward_s + again + whole,
            "backward-weight": stage.weights_s,
            "update": stage.update_s,
        }
        return times[run.instruction.opcode]

    def report(self) -> Simulation:
        """What has happened."""
        ordered = tuple(sorted(self.intervals, key=lambda i: i.start_s))  # stable: a worker's order stays
        return Simulation(
            makespan_s=max(interval.end_s for interval in ordered),
            intervals=ordered,
            events=tuple(tuple(events) for events in self.events),
            workers=tuple(self._worker(machine.program) for machine in self.machines),
            loads=tuple(load for reader in self.readers.values() for load in reader.loads if self.plan.read_s),
        )

    def _worker(self, program: Program) -> WorkerReport:
        mine = [interval for interval in self.intervals if interval.worker == program.worker]
        alive: dict[int, tuple[int, int]] = {}
        stage, owed = self.plan.stages[program.worker], 0
        peak_tapes = peak_owed = peak_bytes = peak_versions = 0
        gaps = [0]
        stash, ahead = (any(i.weights == which for i in program.drain) for which in ("forward", "ahead"))
        oldest: int | None = None
        for interval in mine:
            if interval.opcode == "forward":
                alive[interval.g] = (interval.reads, interval.distance)
                oldest = interval.keep
                gaps.append(self.headers[interval.g].batch - interval.reads)
            newest = interval.version
            held = {(version, 0) for version in range(newest if oldest is None else min(oldest, newest), newest + 1)}
            held |= set(alive.values()) if stash else {v for g, v in alive.items() if g == interval.g and v[1]}
            held |= {(newest, interval.distance)} if ahead else set()
            peak_tapes, peak_versions = max(peak_tapes, len(alive)), max(peak_versions, len(held))
            if interval.opcode == "backward":
                del alive[interval.g]
                owed += program.owed > 0
            peak_owed = max(peak_owed, owed)
            peak_bytes = max(peak_bytes, len(alive) * stage.tape_bytes + owed * stage.owed_bytes)
            owed -= interval.opcode == "backward-weight"
        into = [c for c in program.channels if c.target == program.worker]
        return WorkerReport(
            busy_s=sum(i.end_s - i.start_s for i in mine if i.opcode != "read"),
            data_s=sum(i.end_s - i.start_s for i in mine if i.opcode == "read"),
            registers_peak=self.readers[program.worker].peak if program.worker in self.readers else 0,
            tapes_peak=peak_tapes,
            owed_peak=peak_owed,
            tape_bytes_peak=peak_bytes,
            versions_read=(min(gaps), max(gaps)),
            versions_held_peak=peak_versions,
            unread_peak={c.id: self.on_way_peak[c.id] for c in into},
            unread_bytes_peak=sum(self.on_way_peak[c.id] * self.bytes[c.id] for c in into),
        )


def _message_bytes(plan: Plan, channels: dict[int, Channel]) -> dict[int, int]:
    forward = {(edge.source, edge.target): edge.forward_bytes for edge in plan.edges}
    back = {(edge.target, edge.source): edge.backward_bytes for edge in plan.edges}
    of = {"forward": forward, "gradient": back, "norm": {}}  # a norm is a number, and numbers are not counted
    return {c.id: of[c.kind].get((c.source, c.target), 0) for c in channels.values()}
