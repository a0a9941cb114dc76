"""All machines of a plan, driven by hand: whoever calls decides which pending event comes next.

Messages of one channel stay in order, as do grants of one channel; everything else may overtake everything else. That
is what threads and sockets may do, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from roundelay.actor.machine import Run
from roundelay.actor.machines import machine_for
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read

#: ("result", worker), ("message", channel) or ("grant", channel)
Queue = tuple[str, int]
Choice = Callable[[list[Queue]], Queue]


class World:
    """The machines, and every event that is on its way to one of them.

    Args:
        plan: what they execute.
        headers: the data.
        lost: queues whose events never arrive.
    """

    def __init__(self, plan: Plan, headers: Sequence[MicroBatch], lost: Sequence[Queue] = ()) -> None:
        programs = emit(read(plan))
        self.machines = [machine_for(program, headers[0].g, headers[0].batch) for program in programs]
        self.channels = {c.id: c for program in programs for c in program.channels}
        self.headers = [{header.g: header for header in headers} for _ in programs]
        self.boxed: dict[tuple[int, int], int] = {}
        self.lost = set(lost)
        self.pending: dict[Queue, deque[tuple[int, Callable[[], None]]]] = {}
        self.runs: list[list[Run]] = [[] for _ in programs]
        self.unread_peak = dict.fromkeys(self.channels, 0)
        self.in_flight_peak = [0 for _ in programs]
        for worker in range(len(programs)):
            self.post(("result", worker), worker, lambda: None)

    def post(self, queue: Queue, worker: int, happens: Callable[[], None]) -> None:
        """Something sets out for ``worker``."""
        if queue not in self.lost:
            self.pending.setdefault(queue, deque()).append((worker, happens))

    def step(self, queue: Queue) -> None:
        """The first event of ``queue`` arrives."""
        worker, happens = self.pending[queue].popleft()
        machine = self.machines[worker]
        happens()
        run = machine.fire()
        if run is not None:
            self.runs[worker].append(run)
            self.headers[worker][run.g] = run.header or self.headers[worker][run.g]  # as a message carries it
            self.post(("result", worker), worker, partial(self.finish, worker, run))
        for number, unread in machine.unread.items():
            self.unread_peak[number] = max(self.unread_peak[number], len(unread))
        self.in_flight_peak[worker] = max(self.in_flight_peak[worker], machine.in_flight)

    def finish(self, worker: int, run: Run) -> None:
        """A run has ended: its messages and grants set out."""
        header = self.headers[worker][run.g]
        self.machines[worker].finish(header if run.instruction.opcode == "read" else None)
        for number, _ in run.gives:
            targets = [port.worker for port in self.channels[number].targets]
            self.boxed[number, run.g] = self.boxed.get((number, run.g), 0) + 1
            if self.boxed[number, run.g] == len(targets):  # in an exchange the last holder that begins it
                for target in targets:
                    self.post(("message", number), target, partial(self.machines[target].arrive, number, header))
        for number, _ in run.takes:
            sources = [port.worker for port in self.channels[number].sources]
            source = worker if worker in sources else sources[0]
            self.post(("grant", number), source, partial(self.machines[source].grant, number))

    def run(self, choose: Choice) -> World:
        """Until nothing is pending."""
        while queues := [queue for queue, events in self.pending.items() if events]:
            self.step(choose(queues))
        return self

    @property
    def texts(self) -> list[list[str]]:
        """For each worker, the instructions it fired, as text."""
        return [[str(run) for run in runs] for runs in self.runs]


def in_turn(queues: list[Queue]) -> Queue:
    """The queue that was opened first: a calm world."""
    return queues[0]


def at_random(seed: int) -> Choice:
    """Any queue, by lot."""
    random = Random(seed)
    return random.choice


def starving(seed: int) -> Choice:
    """Some queues always before others: the last of them move only when nothing else can."""
    random = Random(seed)
    urgency: dict[Queue, float] = {}
    return lambda queues: max(queues, key=lambda queue: urgency.setdefault(queue, random.random()))
