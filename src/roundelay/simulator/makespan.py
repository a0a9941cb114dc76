"""The seconds of a run and nothing else of it: those of :func:`roundelay.simulator.simulate`, in a part of the time.

The same machines run the same programs, and every time is the same. Three things are left out:

- all holders of a stage but two, whose times are kept side by side: the first, which reads, or gets what a first one
  sends, and one that stands for the others (:mod:`roundelay.lower.alike_holders`). One machine goes for both;
- the queue of events. An instruction ends when its messages are there, by times that are known as soon as the machines
  of those who send them are through;
- turns of the machine: neighbouring lines of a stage on one micro-batch are one instruction of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roundelay.actor.machine import Run
from roundelay.errors import PlanError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.program import Instruction, Program
from roundelay.lower.alike_holders import first_holders
from roundelay.lower.channels import REGISTERS
from roundelay.lower.emit import emit
from roundelay.lower.reading import Reading, read
from roundelay.simulator.simulation import Clock, simulate


def makespan_s(plan: Plan, micro_batches: Sequence[MicroBatch]) -> float:
    """Seconds from the first event of a run to the last.

    Args:
        plan: the plan, which has the times.
        micro_batches: headers of the micro-batches to run; at least one.

    Raises:
        PlanError: as :func:`roundelay.simulator.simulate`.
    """
    reading = read(plan)
    if micro_batches and reading.form is None and not (reading.needs_norm and reading.mesh.size > 1):
        try:
            return _in_step(plan, reading, micro_batches)
        except _NotInStepError:
            pass
    return simulate(plan, emit(reading), micro_batches).makespan_s


def _in_step(plan: Plan, reading: Reading, micro_batches: Sequence[MicroBatch]) -> float:
    first = read(first_holders(plan)) if reading.mesh.size > 1 else reading
    holders = _Holders(plan, first, emit(first), micro_batches)
    holders.run()
    return max(max(times) for times in holders.free)


class _NotInStepError(Exception):
    """A first holder is later than the others, which are not alike then; or a machine waits for one of its own lines."""


_Times = tuple[float, float]
"""Seconds on the first holder of a stage and on another; the same where there is one."""


class _Ends(NamedTuple):
    """The channels of a line.

    Args:
        takes: those from other stages.
        gives: those to them.
        unboxed: the exchange that it ends.
        boxed: the exchange that it begins.
    """

    takes: tuple[int, ...]
    gives: tuple[int, ...]
    unboxed: tuple[int, ...]
    boxed: tuple[int, ...]


_Step = tuple[float, _Ends | None]
"""A line of a program: seconds that it computes, and its channels, if it has any."""


@dataclass(frozen=True, slots=True)
class _Lines(Instruction):
    """Neighbouring lines of a stage on one micro-batch as one instruction.

    Args:
        steps: the lines.
    """

    steps: tuple[_Step, ...] = ()


class _Holders(Clock):
    """One or two holders of each stage, in step.

    Args:
        plan: that has the times.
        structure: of the plan of the first holders alone.
        programs: of these.
        micro_batches: headers of the micro-batches to run.
    """

    def __init__(
        self, plan: Plan, structure: Reading, programs: Sequence[Program], micro_batches: Sequence[MicroBatch]
    ) -> None:
        super().__init__(plan, structure, programs, micro_batches, [None] * len(programs))
        self._size = plan.grid.size
        #: by worker, when the holders are through with the last of their lines
        self.free: list[_Times] = [(0.0, 0.0)] * len(programs)
        self._arrived: dict[int, deque[_Times]] = defaultdict(deque)
        self._granted = {c.id: deque([(0.0, 0.0)] * c.slots) for c in self.channels.values()}
        self._registers = deque([0.0] * REGISTERS)
        self._complete: dict[int, float] = {}  # by exchange
        self._due = deque(range(len(programs)))  # workers whose machines may go on

    def prepared(self, program: Program) -> Program:
        """The program with neighbouring lines as one."""
        exchanges = frozenset([channel.id for channel in program.channels if channel.phases])
        groups: list[tuple[object, list[Instruction], list[_Step]]] = []
        for line in program.body:
            key = line.stage, line.offset, line.once_a_batch, line.opcode == "read"
            ends = _ends(line, exchanges) if line.takes or line.gives else None
            known, lines, steps = groups[-1] if groups else (None, [], [])
            if key != known or (ends and ends.takes and any(own and own.gives for _, own in steps)):
                groups.append((key, lines := [], steps := []))
            lines.append(line)
            steps.append((self.seconds_of(program, line), ends))
        return Program(
            *(program.worker, program.num_workers, program.every, program.over),
            *(program.tapes, program.owed, program.registers, program.channels),
            body=tuple([_as_one(lines, steps) for _, lines, steps in groups]),
        )

    def run(self) -> None:
        """Run until every machine has halted."""
        while self._due:
            worker = self._due.popleft()
            while (run := self.machines[worker].fire()) is not None:
                self._execute(worker, run)
        if not all(machine.halted for machine in self.machines):
            raise _NotInStepError

    def _execute(self, worker: int, run: Run) -> None:
        """Carry out an instruction, and give its messages and grants to the machines."""
        line, header = run.instruction, self.headers[worker][run.g]
        reads = line.opcode == "read"
        assert isinstance(line, _Lines)
        begin = self._read(worker, run.g) if reads else self.free[worker]
        self.free[worker] = self._through(line.steps, worker, begin)
        self.machines[worker].finish(header if reads else None)
        for number in line.gives:
            consumer = self.channels[number].targets[0].worker
            self.machines[consumer].arrive(number, header)
            self._due.append(consumer)
        for number in line.takes:
            producer = self.channels[number].sources[0].worker
            self.machines[producer].grant(number)
            self._due.append(producer)

    def _read(self, worker: int, g: int) -> _Times:
        """When the first holder has read a micro-batch, and another has it from there."""
        first, other = self.free[worker]
        self.now = first if self._size == 1 else max(first, self._registers.popleft())
        read_s = self.now + self.load_s(worker, g)
        if self._size == 1:
            return read_s, read_s
        other = max(other, self.arrival(-1, self.plan.input_bytes, read_s))
        self._registers.append(other + self.plan.latency_s)
        return read_s, other

    def _through(self, steps: Sequence[_Step], worker: int, times: _Times) -> _Times:
        """When the holders are through with lines that they begin at ``times``."""
        first, other = times
        for seconds, ends in steps:
            if ends is None:
                first, other = first + seconds, other + seconds
                continue
            takes, gives, unboxed, boxed = ends
            for number in takes:
                first, other = _later(first, other, self._arrived[number].popleft())
            for number in gives:
                first, other = _later(first, other, self._granted[number].popleft())
            for number in unboxed:
                complete = self._complete[number]
                first, other = _later(first, other, (complete, complete))
            first, other = first + seconds, other + seconds
            for number in boxed:
                if first > other and self._size > 2:
                    raise _NotInStepError
                self._complete[number] = max(first, other) + self.exchange_s[number]
            for number in gives:
                self._arrived[number].append(self._arrivals(number, worker, (first, other)))
            for number in takes:
                grant_s = 0.0 if self.channels[number].filled_by(worker) else self.plan.latency_s
                self._granted[number].append((first + grant_s, other + grant_s))
        return first, other

    def _arrivals(self, number: int, worker: int, times: _Times) -> _Times:
        """When messages arrive that the holders send at ``times``."""
        if self.channels[number].read_by(worker):
            return times
        first, other = (self.arrival(2 * number + i, self.bytes[number], time) for i, time in enumerate(times))
        return first, other


def _later(first: float, other: float, times: _Times) -> _Times:
    return (first if first > times[0] else times[0]), (other if other > times[1] else times[1])


def _ends(line: Instruction, exchanges: frozenset[int]) -> _Ends:
    takes, gives = line.takes, line.gives
    if not exchanges.isdisjoint(takes):
        return _Ends((), gives, takes, ())
    if not exchanges.isdisjoint(gives):
        return _Ends(takes, (), (), gives)
    return _Ends(takes, gives, (), ())


def _as_one(lines: Sequence[Instruction], steps: Sequence[_Step]) -> Instruction:
    """Lines as one: to the machine the first forward, which says when the run ends, or the first of all."""
    one = next((line for line in lines if line.opcode == "forward" and line.runs_first), lines[0])
    ends = [own for _, own in steps if own is not None]
    takes = tuple([channel for own in ends for channel in own.takes])
    gives = tuple([channel for own in ends for channel in own.gives])
    return _Lines(one.opcode, one.stage, one.offset, takes, gives, of=one.of, segments=one.segments, steps=tuple(steps))
