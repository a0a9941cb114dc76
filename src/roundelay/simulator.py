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
from roundelay.ir.micro_batch import Load, MicroBatch
from roundelay.ir.plan import Plan, StagePlan
from roundelay.ir.program import Channel, Program


@dataclass(frozen=True, slots=True)
class Interval:
    """One instruction in time: seconds from the start of the run."""

    worker: int
    stage: int
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
        tapes_peak: most forwards waiting for their backward at one time, on all of its stages.
        owed_peak: most backwards waiting for their weights' half at one time, on all of its stages.
        tape_bytes_peak: most bytes that both hold at one time.
        versions_read: smallest and largest distance between the batch of a forward and the version it reads.
        versions_held_peak: most versions of a stage's weights alive at one time, predicted copies included.
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

    def __repr__(self) -> str:
        return (
            f"Simulation(makespan_s={self.makespan_s:.6g}, bubble={self.bubble:.3f}, workers={len(self.workers)}, "
            f"intervals={len(self.intervals)})"
        )

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
        self.intervals.append(Interval(worker, run.stage, opcode, run.g, *weights, self.now, self.now + seconds))
        self.push(seconds, worker, partial(self.finish, worker, run))

    def finish(self, worker: int, run: Run) -> None:
        """A run has ended: its messages and grants set out; what stays on the worker is there at once."""
        self.machines[worker].finish(self.headers[run.g] if run.instruction.opcode == "read" else None)
        for number, _ in run.gives:
            reader = self.channels[number].target.worker
            arrives = partial(self.machines[reader].arrive, number, self.headers[run.g])
            self.push(0.0 if reader == worker else self.travel_s(number), reader, arrives)
        for number, _ in run.takes:
            self.on_way[number] -= 1
            maker = self.channels[number].source.worker
            back_s = 0.0 if maker == worker else self.plan.latency_s
            self.push(back_s, maker, partial(self.machines[maker].grant, number))

    def travel_s(self, channel: int) -> float:
        """Seconds until a message that sets out now is there; it waits for the one before it."""
        start = max(self.now, self.link_free[channel])
        self.link_free[channel] = start + self.bytes[channel] / self.plan.bytes_per_s
        return self.link_free[channel] + self.plan.latency_s - self.now

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
        stage = self.plan.stages[run.stage]
        again = stage.forward_s if run.instruction.mode == "recompute" else 0.0
        whole = 0.0 if self.machines[worker].program.owed else stage.weights_s
        times = {
            "forward": stage.forward_s,
            "backward": stage.backward_s + again + whole,
            "backward-weight": stage.weights_s,
            "update": stage.update_s,
            "grad-norm-sq": 0.0,  # too short to be measured
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
        holds = {k: _Holds(self.plan.stages[k], program) for k in program.stages}
        peak_tapes = peak_owed = peak_bytes = 0
        for interval in mine:
            held = holds[interval.stage]
            held.begin(interval)
            peak_tapes = max(peak_tapes, sum(len(one.alive) for one in holds.values()))
            held.end_of_backward(interval)
            peak_owed = max(peak_owed, sum(one.owed for one in holds.values()))
            peak_bytes = max(peak_bytes, sum(one.tape_bytes for one in holds.values()))
            held.owed -= interval.opcode == "backward-weight"
        gaps = [self.headers[i.g].batch - i.reads for i in mine if i.opcode == "forward"]
        into = [c for c in program.channels if c.target.worker == program.worker]
        return WorkerReport(
            busy_s=sum(i.end_s - i.start_s for i in mine if i.opcode != "read"),
            data_s=sum(i.end_s - i.start_s for i in mine if i.opcode == "read"),
            registers_peak=self.readers[program.worker].peak if program.worker in self.readers else 0,
            tapes_peak=peak_tapes,
            owed_peak=peak_owed,
            tape_bytes_peak=peak_bytes,
            versions_read=(min([0, *gaps]), max([0, *gaps])),
            versions_held_peak=max(one.versions_peak for one in holds.values()),
            unread_peak={c.id: self.on_way_peak[c.id] for c in into},
            unread_bytes_peak=sum(self.on_way_peak[c.id] * self.bytes[c.id] for c in into),
        )


class _Holds:
    """What one stage holds, while its intervals are gone through in order.

    Args:
        stage: its bytes.
        program: its worker's.
    """

    def __init__(self, stage: StagePlan, program: Program) -> None:
        self.stage, self.halved = stage, program.owed > 0
        read = {instruction.weights for instruction in program.body}
        self.stash = "forward" in read
        #: micro-batch that waits for its backward, to the version and the distance that its forward has read
        self.alive: dict[int, tuple[int, int]] = {}
        #: backwards that wait for their second half
        self.owed = 0
        self.versions_peak = 0
        self._oldest: int | None = None  # version that a later forward may read
        #: by opcode, version and distance of the prediction that is kept until the update
        self._predicted: dict[str, tuple[int, int]] = {}

    @property
    def tape_bytes(self) -> int:
        """Bytes of all that waits."""
        return len(self.alive) * self.stage.tape_bytes + self.owed * self.stage.owed_bytes

    def begin(self, interval: Interval) -> None:
        """A forward leaves a tape; any instruction may be the one at which most versions are alive."""
        if interval.opcode == "forward":
            self.alive[interval.g] = (interval.reads, interval.distance)
            self._oldest = interval.keep
        if interval.distance:
            self._predicted[interval.opcode] = (interval.version, interval.distance)
        newest = interval.version
        oldest = newest if self._oldest is None else min(self._oldest, newest)
        held = {(version, 0) for version in range(oldest, newest + 1)}
        held |= set(self.alive.values()) if self.stash else set()
        held |= set(self._predicted.values())
        self.versions_peak = max(self.versions_peak, len(held))
        if interval.opcode == "update":
            self._predicted.clear()

    def end_of_backward(self, interval: Interval) -> None:
        """A backward takes its tape away, and leaves a debt if it was a first half."""
        if interval.opcode == "backward":
            del self.alive[interval.g]
            self.owed += self.halved


def _message_bytes(plan: Plan, channels: dict[int, Channel]) -> dict[int, int]:
    forward = {(edge.source, edge.target): edge.forward_bytes for edge in plan.edges}
    back = {(edge.target, edge.source): edge.backward_bytes for edge in plan.edges}
    of = {"forward": forward, "gradient": back}  # the others carry numbers, which are not counted
    return {c.id: of.get(c.kind, {}).get((c.source.stage, c.target.stage), 0) for c in channels.values()}
