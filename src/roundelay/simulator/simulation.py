"""The simulator: runs the runtime's own machines on a virtual clock, without threads, processes or torch.

Times come from the plan: seconds of each stage's forward, backward and update, seconds to read a micro-batch, and
latency and bandwidth of messages. The result is the sequence of events with their times and peak memory; nothing is
computed by formula.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from roundelay.actor.data_reader import Reader
from roundelay.actor.machine import Run
from roundelay.actor.machines import machine_for
from roundelay.errors import PlanError
from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.program import OPCODES, Channel, Instruction, Program
from roundelay.lower.channels import exchanges_of
from roundelay.lower.priced_bytes import message_bytes
from roundelay.lower.reading import read
from roundelay.simulator.held_by_stage import peaks
from roundelay.simulator.simulation_result import Interval, Simulation, WorkerReport

Vary = Callable[[int, Run, float], float]
"""From a worker, an instruction and its predicted seconds to the seconds that it takes."""


def simulate(
    plan: Plan,
    programs: Sequence[Program],
    micro_batches: Sequence[MicroBatch],
    in_flight: Sequence[Mapping[int, int]] | None = None,
    vary: Vary = lambda worker, run, seconds: seconds,
) -> Simulation:
    """Run ``programs`` on a virtual clock.

    Args:
        plan: the plan, which has the times.
        programs: one per worker, emitted from that plan.
        micro_batches: headers of the micro-batches to run.
        in_flight: for a run resumed with micro-batches in flight, the argument of each
            :class:`~roundelay.actor.machine.Machine`.
        vary: from a worker, an instruction that computes and its predicted seconds to those that it takes.

    Raises:
        PlanError: the programs deadlock or leave messages unread, or there is no micro-batch.
    """
    if not micro_batches:
        raise PlanError("a simulation", got="no micro-batch", expected="at least one", remedy="Give one batch or more.")
    clock = Clock(plan, programs, micro_batches, in_flight or [None] * len(programs), vary)
    clock.run()
    return clock.report()


class Clock:
    """The virtual clock: a heap of (time, order, worker, event)."""

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[Program],
        micro_batches: Sequence[MicroBatch],
        in_flight: Sequence[Mapping[int, int] | None],
        vary: Vary,
    ) -> None:
        self.plan, self.vary = plan, vary
        every = {header.g: header for header in micro_batches}
        self.headers = [dict(every) for _ in programs]  # of each worker, as its replica knows them
        first = micro_batches[0]
        self.readers = {p.worker: Reader(p.worker, p.registers) for p in programs if p.registers}
        self.channels: dict[int, Channel] = {c.id: c for program in programs for c in program.channels}
        lines = {(p.worker, i.stage, i.opcode, i.segments) for p in programs for i in p.body}
        self.parts = Counter(line[:3] for line in lines)
        self.machines = [
            machine_for(self.prepared(program), first.g, first.batch, redone)
            for program, redone in zip(programs, in_flight, strict=True)
        ]
        self.boxed: dict[tuple[int, int], int] = {}  # by channel and micro-batch: how many holders have begun
        self.now = 0.0
        self.heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self.num_pushed = 0
        self.intervals: list[Interval] = []
        self.events: list[list[str]] = [[] for _ in programs]
        self.link_free: dict[int, float] = {}  # by channel
        self.on_way: dict[tuple[int, int], int] = {}  # by channel and the worker that gets it
        self.on_way_peak: dict[tuple[int, int], int] = {}
        self.bytes_on_way: Counter[int] = Counter()  # by the worker that gets them
        self.bytes_on_way_peak: Counter[int] = Counter()

    @cached_property
    def bytes(self) -> dict[int, int]:
        """By channel the bytes of a message, or of what an exchange leaves."""
        return message_bytes(read(self.plan))

    @cached_property
    def exchanges(self) -> dict[int, ExchangePlan]:
        """What is exchanged, by channel."""
        return exchanges_of(read(self.plan), [self.channels[number] for number in sorted(self.channels)])

    @cached_property
    def exchange_s(self) -> dict[int, float]:
        """Seconds of each exchange from where all have begun, by channel."""
        own = self.exchanges.items()
        return {number: exchange_s(self.plan, e, len(self.channels[number].sources)) for number, e in own}

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How fast each worker is."""
        return tuple([worker.speed for worker in self.plan.workers])

    @cached_property
    def links(self) -> dict[int, tuple[float, float]]:
        """Seconds of an empty message and bytes per second of each channel; of the plan's data under -1."""
        usual = self.plan.latency_s, self.plan.bytes_per_s
        own = {(e.source, e.target): (e.latency_s, e.bytes_per_s) for e in self.plan.edges if e.bytes_per_s}
        ends = {n: sorted([c.sources[0].stage, c.targets[0].stage]) for n, c in self.channels.items() if own}
        return dict.fromkeys([-1, *self.channels], usual) | {n: own.get((a, b), usual) for n, (a, b) in ends.items()}

    def prepared(self, program: Program) -> Program:
        """The program that a machine runs."""
        return program

    def run(self) -> None:
        """Run until every machine has halted."""
        for worker in range(len(self.machines)):
            self.fire(worker)
        while self.heap:
            self.now, _, worker, event = heapq.heappop(self.heap)
            event()
            self.fire(worker)
        stuck = [machine for machine in self.machines if not machine.halted]
        unread_channels = [c for machine in self.machines for c, unread in machine.unread.items() if unread]
        if not stuck and unread_channels:
            raise PlanError(
                "the programs of the plan",
                got=f"messages left unread on channel {unread_channels[0]}",
                expected="every message that is sent to be taken",
                remedy="Report this as a bug of Roundelay, with the plan.",
            )
        if stuck:
            raise PlanError(
                "the programs of the plan",
                got="a deadlock: " + "; ".join(f"worker {m.program.worker}: {m.waits_for()}" for m in stuck),
                expected="enough slots for every worker to go on",
                remedy="Raise `slots` of the edges that are waited for.",
            )

    def push(self, delay: float, worker: int, event: Callable[[], None]) -> None:
        """Schedule an event of ``worker``, ``delay`` seconds from now."""
        self.num_pushed += 1
        heapq.heappush(self.heap, (self.now + delay, self.num_pushed, worker, event))

    def fire(self, worker: int) -> None:
        """Start the next instruction of the worker if it can run now, and schedule its end."""
        run = self.machines[worker].fire()
        if run is None:
            return
        own, loads = self.machines[worker].program, run.instruction.opcode in ("read", "deal") and not run.takes
        seconds = self.load_s(worker, run.g) if loads else self.vary(worker, run, self.compute_s(own, run.instruction))
        for channel, _ in run.gives:
            self.count(channel, self.consumer(channel, worker, run.g), 1)
        self.events[worker].append(str(run))
        if run.header is not None:
            self.headers[worker][run.g] = run.header  # as a message of this micro-batch carries it
        self.push(seconds, worker, partial(self.finish, worker, run, self.now))

    def finish(self, worker: int, run: Run, start_s: float) -> None:
        """End an instruction: send its messages and grants; those within the worker arrive at once."""
        header, line = self.header(worker, run), run.instruction
        entry = run.header.entry if run.header is not None else 0
        weights = run.version, run.reads, run.keep, run.distance, entry
        what = line.of, line.continues, line.takes, line.gives
        self.intervals.append(
            Interval(worker, run.stage, line.opcode, run.g, *weights, start_s, self.now, header.batch, *what)
        )
        self.machines[worker].finish(header if run.instruction.opcode in ("read", "deal") else None)
        for number, _ in run.gives:
            if self.channels[number].phases:
                self.box(number, header)
            else:
                self.send(number, worker, header)
        for number, _ in run.takes:
            self.count(number, worker, -1)
            channel = self.channels[number]
            producer = worker if channel.phases else channel.refilled_by(run.g).worker
            grant_s = 0.0 if producer == worker else self.links[number][0]
            self.push(grant_s, producer, partial(self.machines[producer].grant, number, worker))

    def header(self, worker: int, run: Run) -> MicroBatch:
        """The header that goes with an instruction's messages; those of a stage's state tell its updates."""
        known = self.headers[worker].get(run.g)
        if run.instruction.opcode == "pass" or known is None:
            return MicroBatch(run.g, run.version, 0, 1, 0, 1, 0, 0, 0, entry=run.version)
        return known

    def send(self, number: int, worker: int, header: MicroBatch) -> None:
        """Let a message arrive."""
        consumer = self.channels[number].target_of(header.g).worker
        arrive = partial(self.machines[consumer].arrive, number, header)
        self.push(0.0 if consumer == worker else self.transfer_s(number, self.bytes[number], number), consumer, arrive)

    def box(self, number: int, header: MicroBatch) -> None:
        """Count a holder that begins an exchange; when all have, it takes its time and is complete for each."""
        holders, key = self.channels[number].targets, (number, header.g)
        self.boxed[key] = self.boxed.get(key, 0) + 1
        if self.boxed[key] == len(holders):
            del self.boxed[key]
            for port in holders:
                known = self.headers[port.worker][header.g]
                arrive = partial(self.machines[port.worker].arrive, number, known)
                self.push(self.exchange_s[number], port.worker, arrive)

    def consumer(self, number: int, worker: int, g: int) -> int:
        """The worker that gets what this one gives of a micro-batch: in an exchange itself."""
        return worker if self.channels[number].phases else self.channels[number].target_of(g).worker

    def count(self, number: int, consumer: int, change: int) -> None:
        """Count a message on the way to a worker, or unread."""
        key = number, consumer
        self.on_way[key] = self.on_way.get(key, 0) + change
        self.on_way_peak[key] = max(self.on_way_peak.get(key, 0), self.on_way[key])
        self.bytes_on_way[consumer] += change * self.bytes[number]
        self.bytes_on_way_peak[consumer] = max(self.bytes_on_way_peak[consumer], self.bytes_on_way[consumer])

    def transfer_s(self, link: int, num_bytes: int, number: int) -> float:
        """Return the seconds until a message on a channel arrives; messages of one link are sent one by one."""
        latency_s, bytes_per_s = self.links[number]
        start = max(self.now, self.link_free.get(link, 0.0))
        self.link_free[link] = start + num_bytes / bytes_per_s
        return self.link_free[link] + latency_s - self.now

    def load_s(self, worker: int, g: int) -> float:
        """Return the seconds until the micro-batch to be read now is in a register."""
        header, reader = self.headers[worker][g], self.readers.get(worker)
        if reader is None:
            raise PlanError(
                f"the program of worker {worker}",
                got="a deadlock: `read` without a register",
                expected="registers for what it reads",
                remedy="Report this as a bug of Roundelay, with the plan.",
            )
        batch_s = self.plan.read_s * header.count * self.plan.replicas
        return reader.request(header.batch, batch_s, self.now) - self.now

    def compute_s(self, program: Program, line: Instruction) -> float:
        """Return the predicted seconds of a line of a program on its worker."""
        return (self.plan.instruction_s + self._work_s(program, line)) / self.speeds[program.worker]

    def _work_s(self, program: Program, line: Instruction) -> float:
        stage, recompute = self.plan.stages[line.stage], line.mode == "recompute"
        if line.opcode == "forward":
            seconds = stage.forward_s
        elif line.opcode == "backward":
            weights_s = 0.0 if program.owed else stage.weights_s
            seconds = stage.backward_s + (stage.forward_s if recompute else 0.0) + weights_s
        elif line.opcode in ("backward-weight", "update"):
            seconds = stage.weights_s if line.opcode == "backward-weight" else stage.update_s
        elif line.opcode == "box":
            return sum([self.exchanges[number].busy_s for number in line.gives])
        else:  # which takes next to nothing
            return 0.0
        return seconds / self.parts[program.worker, line.stage, line.opcode]  # which are taken to be equal

    def report(self) -> Simulation:
        """Return the simulated run."""
        own: dict[int, list[Interval]] = {machine.program.worker: [] for machine in self.machines}
        for interval in self.intervals:
            own[interval.worker].append(interval)
        ordered = tuple(sorted(self.intervals, key=lambda i: i.start_s))  # stable: keeps each worker's order
        return Simulation(
            makespan_s=max(interval.end_s for interval in ordered),
            intervals=ordered,
            events=tuple(tuple(events) for events in self.events),
            workers=tuple(self._worker(machine.program, own[machine.program.worker]) for machine in self.machines),
            loads=tuple(load for reader in self.readers.values() for load in reader.loads if self.plan.read_s),
        )

    def _worker(self, program: Program, intervals: Sequence[Interval]) -> WorkerReport:
        held = peaks(program, self.plan.stages, intervals)
        staleness = [self.headers[program.worker][i.g].batch - i.reads for i in intervals if i.opcode == "forward"]
        incoming = [c.id for c in program.channels if c.read_by(program.worker)]
        unread = {number: self.on_way_peak.get((number, program.worker), 0) for number in incoming}
        return WorkerReport(
            busy_s=sum(i.end_s - i.start_s for i in intervals if OPCODES[i.opcode].share != "data"),
            data_s=sum(i.end_s - i.start_s for i in intervals if OPCODES[i.opcode].share == "data"),
            registers_peak=self.readers[program.worker].peak if program.worker in self.readers else 0,
            tapes_peak=held["tapes"],
            owed_peak=held["owed"],
            tape_bytes_peak=held["tape_bytes"],
            weight_bytes_peak=held["weight_bytes"],
            version_bytes_peak=held["version_bytes"],
            versions_read=(min([0, *staleness]), max([0, *staleness])),
            versions_held_peak=held["versions"],
            unread_peak=unread,
            unread_bytes_peak=self.bytes_on_way_peak[program.worker],
        )


def exchange_s(plan: Plan, exchange: ExchangePlan, holders: int) -> float:
    """Seconds of an exchange from where all have begun; if they are not known, the holder that sends most sets them."""
    if exchange.seconds:
        return exchange.seconds
    most = map(max, zip(*[exchange.bytes_sent(holders, i) for i in range(holders)], strict=True))
    return float(sum(plan.latency_s + sent / plan.bytes_per_s for sent in most))
