"""The seconds of a run and nothing else of it: those of :func:`roundelay.simulator.simulate`, in a part of the time.

The same machines run the same programs, and every time is the same. Three things are left out:

- all holders of a stage but two, whose times are kept side by side: the first, and one that stands for the others
  (:mod:`roundelay.lower.alike_holders`). One machine goes for both;
- the queue of events: an instruction ends when it can by times that are known once the machines before it are through;
- turns of the machine: neighbouring lines of a stage on one micro-batch are one instruction of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from roundelay.actor.machine import Run
from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.program import Instruction, Program
from roundelay.lower.alike_holders import equally_fast, first_holders
from roundelay.lower.channels import REGISTERS
from roundelay.lower.emit import emit
from roundelay.lower.priced_bytes import message_bytes
from roundelay.lower.reading import read
from roundelay.simulator.simulation import Clock, exchange_s, simulate


def makespan_s(plan: Plan, micro_batches: Sequence[MicroBatch]) -> float:
    """Seconds from the first event of a run to the last.

    Args:
        plan: the plan, which has the times.
        micro_batches: headers of the micro-batches to run; at least one.

    Raises:
        PlanError: as :func:`roundelay.simulator.simulate`.
    """
    reading = read(plan)
    alike = (
        reading.form is None
        and not reading.free
        and not (reading.needs_norm and reading.mesh.size > 1)
        and equally_fast(plan)
    )
    if micro_batches and alike:
        try:
            holders = _Holders(plan, micro_batches)
            holders.run()
            return max(max(times) for times in holders.free)
        except _NotInStepError:
            pass
    return simulate(plan, emit(reading), micro_batches).makespan_s


class _NotInStepError(Exception):
    """A first holder is later than the others, which are not alike then; or lines cannot be one instruction."""


_Times = tuple[float, float]
"""Seconds on the first holder of a stage and on another; the same where there is one."""

_Ends = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Of a line: channels that it waits for, ~channel for free slots; exchanges begun; channels to others; from others."""

_Step = tuple[float, _Ends | None]
"""A line of a program: seconds that it computes, and its channels, if it has any."""


@dataclass(frozen=True, slots=True)
class _Lines(Instruction):
    """Neighbouring lines of a stage on one micro-batch as one instruction: ``steps``."""

    steps: tuple[_Step, ...] = ()


class _Holders(Clock):
    """One or two holders of each stage, in step."""

    def __init__(self, plan: Plan, micro_batches: Sequence[MicroBatch]) -> None:
        self._size = plan.grid.size
        self._first = read(first_holders(plan) if self._size > 1 else plan)
        programs = emit(self._first)
        super().__init__(plan, programs, micro_batches, [None] * len(programs), lambda _, __, seconds: seconds)
        #: by worker, when the holders are through with the last of their lines
        self.free: list[_Times] = [(0.0, 0.0)] * len(programs)
        self._registers = deque([0.0] * REGISTERS)
        #: times of messages by channel, and of free slots by ~channel
        self._times: dict[int, deque[_Times]] = {number: deque() for number in self.channels}
        self._times |= {~number: deque([(0.0, 0.0)] * channel.slots) for number, channel in self.channels.items()}
        self._due = set(range(len(programs)))  # workers whose machines may go on

    @cached_property
    def bytes(self) -> dict[int, int]:
        """By channel the bytes of a message."""
        return message_bytes(self._first)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How fast the holders of each worker's stages are."""
        return tuple([worker.speed for worker in self._first.plan.workers])

    @cached_property
    def exchanges(self) -> dict[int, ExchangePlan]:
        """Those of all holders, by channel of the first ones."""
        numbers = [number for number in sorted(self.channels) if self.channels[number].phases]
        return dict(zip(numbers, [e for e in self.plan.exchanges if e.phases], strict=True))

    @cached_property
    def exchange_s(self) -> dict[int, float]:
        """Seconds of each exchange of all holders, by channel of the first ones; the same for those that are alike."""
        sizes, known, found = self.plan.grid.sizes, dict[object, float](), dict[int, float]()
        for number, e in self.exchanges.items():
            what = e.axis, e.phases, e.dtypes, e.shapes, e.seconds, e.busy_s
            known[what] = known[what] if what in known else exchange_s(self.plan, e, sizes[e.axis])
            found[number] = known[what]
        return found

    def prepared(self, program: Program) -> Program:
        """The program with neighbouring lines as one."""
        exchanges = frozenset([channel.id for channel in program.channels if channel.phases])
        groups: list[tuple[object, list[Instruction], list[_Step]]] = []
        for line in program.body:
            key = line.stage, line.offset, line.once_a_batch, line.opcode == "read"
            ends = _ends(line, exchanges) if line.takes or line.gives else None
            known, lines, steps = groups[-1] if groups else (None, [], [])
            if key != known or (ends and ends[3] and any(own and own[2] for _, own in steps)):
                groups.append((key, lines := [], steps := []))
            lines.append(line)
            steps.append((self.compute_s(program, line), ends))
        return replace(program, body=tuple([_as_one(lines, steps) for _, lines, steps in groups]))

    def run(self) -> None:
        """Run until every machine has halted."""
        while self._due:
            worker = self._due.pop()
            while (run := self.machines[worker].fire()) is not None:
                self._execute(worker, run)
        if not all(machine.halted for machine in self.machines):
            raise _NotInStepError

    def _execute(self, worker: int, run: Run) -> None:
        """Carry out an instruction, and give its messages and grants to the machines."""
        line, header = run.instruction, self.headers[worker][run.g]
        assert isinstance(line, _Lines)
        reads = line.opcode == "read"
        self.free[worker] = self._through(line.steps, worker, self._read(worker, run.g) if reads else self.free[worker])
        self.machines[worker].finish(header if reads else None)
        for number in line.gives:
            self.machines[consumer := self.channels[number].targets[0].worker].arrive(number, header)
            self._due.add(consumer)
        for number in line.takes:
            self.machines[producer := self.channels[number].sources[0].worker].grant(number)
            self._due.add(producer)

    def _read(self, worker: int, g: int) -> _Times:
        """When the first holder has read a micro-batch, and another has it from there."""
        first, other = self.free[worker]
        self.now = first if self._size == 1 else max(first, self._registers.popleft())
        self.now += self.load_s(worker, g)
        if self._size == 1:
            return self.now, self.now
        other = max(other, self.now + self.transfer_s(-1, self.plan.input_bytes, -1))
        self._registers.append(other + self.plan.latency_s)
        return self.now, other

    def _through(self, steps: Sequence[_Step], worker: int, times: _Times) -> _Times:
        """When the holders are through with lines that they begin at ``times``."""
        (first, other), waiting = times, self._times
        for seconds, ends in steps:
            if ends is None:
                first, other = first + seconds, other + seconds
                continue
            waits, begun, gives, takes = ends
            for number in waits:
                one, two = waiting[number].popleft()
                first, other = one if one > first else first, two if two > other else other
            first, other = first + seconds, other + seconds
            for number in begun:
                if first > other and self._size > 2:
                    raise _NotInStepError
                complete_s = max(first, other) + self.exchange_s[number]
                waiting[number].append((complete_s, complete_s))
            for number in gives:
                waiting[number].append(self._arrivals(number, worker, (first, other)))
            for number in takes:
                grant_s = 0.0 if self.channels[number].filled_by(worker) else self.links[number][0]
                waiting[~number].append((first + grant_s, other + grant_s))
        return first, other

    def _arrivals(self, number: int, worker: int, times: _Times) -> _Times:
        """When messages arrive that the holders send at ``times``, each on a link of its own."""
        if self.channels[number].read_by(worker):
            return times
        arrivals = []
        for i, self.now in enumerate(times):
            arrivals.append(self.now + self.transfer_s(2 * number + i, self.bytes[number], number))
        return arrivals[0], arrivals[1]


def _ends(line: Instruction, exchanges: frozenset[int]) -> _Ends:
    begun, gives = ((), line.gives) if exchanges.isdisjoint(line.gives) else (line.gives, ())
    takes = line.takes if exchanges.isdisjoint(line.takes) else ()
    return (*line.takes, *[~number for number in gives]), begun, gives, takes


def _as_one(lines: Sequence[Instruction], steps: Sequence[_Step]) -> Instruction:
    """Lines as one: to the machine the first forward, which says when the run ends, or the first of all."""
    one = next((line for line in lines if line.opcode == "forward" and line.runs_first), lines[0])
    gives, takes = (tuple([c for _, ends in steps if ends for c in ends[i]]) for i in (2, 3))
    return _Lines(one.opcode, one.stage, one.offset, takes, gives, of=one.of, segments=one.segments, steps=tuple(steps))
