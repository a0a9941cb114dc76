"""The machine that executes one worker's program. It does no input or output and knows no clock.

Whoever drives it (the runtime with threads and sockets, the simulator with a heap of virtual times) hands it events and
carries out its commands. An instruction fires when the messages it takes are there and the channels it gives to have a
free slot; then a ``Run`` command is given, and nothing else fires until ``Finished`` comes back. Order and versions
depend on the program and the micro-batches alone, never on timing.

::

    Arrived(channel, header) ─┐                       ┌─ Run(opcode, g, version, distance, slots)
    Granted(channel) ─────────┼──►  Machine.handle ───┼─ Send(channel, g)      after a Run that gives
    Finished(header) ─────────┘                       ├─ Grant(channel)        after a Run that takes
                                                      └─ Halt
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import final

from roundelay.errors import InternalError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.program import ENTRY, PREVIOUS, Instruction, Program


@dataclass(frozen=True, slots=True)
class Start:
    """Begin."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message has arrived on ``channel``; messages of one channel arrive in order."""

    channel: int
    header: MicroBatch


@dataclass(frozen=True, slots=True)
class Granted:
    """The consumer of ``channel`` has freed a slot."""

    channel: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The running instruction is done; a ``read`` brings the micro-batch's header."""

    header: MicroBatch | None = None


Event = Start | Arrived | Granted | Finished


@dataclass(frozen=True, slots=True)
class Run:
    """Carry out an instruction.

    Args:
        instruction: which one.
        g: micro-batch.
        header: of that micro-batch; None for a ``read``.
        version: updates that the stage's weights have seen.
        reads: for a forward, the version that it reads; else ``version``.
        keep: for a forward, the oldest version that a later one may read; None if each reads its newest.
        distance: the number of updates to predict ahead.
        takes: (channel, slot) of each message it consumes.
        gives: (channel, slot) of each message it sends.
    """

    instruction: Instruction
    g: int
    header: MicroBatch | None
    version: int
    reads: int
    keep: int | None
    distance: int
    takes: tuple[tuple[int, int], ...]
    gives: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        words = [f"{self.instruction.opcode} g={self.g}", f"version={self.version}"]
        if self.instruction.reads:
            words.append(f"reads={self.reads}")
        if self.instruction.distance:
            words.append(f"distance={self.distance}")
        words += [f"takes={c}[{slot}]" for c, slot in self.takes] + [f"gives={c}[{slot}]" for c, slot in self.gives]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Send:
    """Send what the last instruction made for micro-batch ``g`` on ``channel``."""

    channel: int
    g: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Tell the producer of ``channel`` that a slot is free."""

    channel: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The program has ended."""


Command = Run | Send | Grant | Halt


@final
class Machine:
    """Executes one program.

    Args:
        program: what to execute.
        first_g: number of the first micro-batch (more than 0 when a run is continued).
        first_version: updates that the weights have seen before.
    """

    def __init__(self, program: Program, first_g: int = 0, first_version: int = 0) -> None:
        self.program = program
        self.version = first_version
        #: free slots at the consumer, for each channel given to
        self.credits = {c.id: c.slots for c in program.channels if c.source == program.worker}
        #: micro-batches whose message is here and unread, for each channel taken from
        self.unread: dict[int, deque[int]] = {c.id: deque() for c in program.channels if c.target == program.worker}
        self._slots = {c.id: c.slots for c in program.channels}
        self._passed = dict.fromkeys(self._slots, 0)  # messages taken or given so far, for the slot's number
        self._headers: dict[int, MicroBatch] = {}
        self._first_version = first_version
        self._forward = self._backward = self._window_start = first_g
        self._window_end: int | None = None
        self._block: tuple[Instruction, ...] = ()
        self._at, self._base = 0, first_g
        self._running: Run | None = None
        self.halted = False

    def handle(self, event: Event) -> list[Command]:
        """Take one event; return what to do, in order."""
        commands: list[Command] = []
        if isinstance(event, Arrived):
            self._arrive(event)
        elif isinstance(event, Granted):
            self._grant(event.channel)
        elif isinstance(event, Finished):
            commands = self._finish(event)
        if self._running is None and not self.halted:
            commands += self._fire()
        return commands

    @property
    def in_flight(self) -> int:
        """Micro-batches that are forward but not yet backward."""
        return self._forward - self._backward

    @property
    def wants_credit(self) -> bool:
        """Whether a free slot is among what the machine waits for."""
        if self._running is not None or self._at >= len(self._block):
            return False
        return any(not self.credits[channel] for channel in self._block[self._at].gives)

    def waits_for(self) -> str:
        """What the machine waits for, for people."""
        if self._running is not None:
            return f"{self._running.instruction.opcode} of micro-batch {self._running.g} is running"
        if self.halted or self._at >= len(self._block):
            return "the program has ended" if self.halted else "it has not started"
        instruction, g = self._block[self._at], self._base + self._block[self._at].offset
        lacks = [f"message {g} on channel {c}" for c in instruction.takes if not self.unread[c]]
        lacks += [f"a free slot of channel {c}" for c in instruction.gives if not self.credits[c]]
        return f"{instruction.opcode} of micro-batch {g} waits for {', '.join(lacks) or 'nothing'}"

    def _arrive(self, event: Arrived) -> None:
        if event.channel not in self.unread:
            raise self._broken(f"a message on channel {event.channel}, which it does not take from")
        unread = self.unread[event.channel]
        in_use = self._running is not None and event.channel in self._running.instruction.takes
        if len(unread) + in_use >= self._slots[event.channel]:
            raise self._broken(f"a message on channel {event.channel} with all {self._slots[event.channel]} slots full")
        unread.append(event.header.g)
        self._headers.setdefault(event.header.g, event.header)

    def _grant(self, channel: int) -> None:
        if self.credits.get(channel, self._slots.get(channel)) == self._slots.get(channel):
            raise self._broken(f"a free slot of channel {channel}, none of which it has filled")
        self.credits[channel] += 1

    def _finish(self, event: Finished) -> list[Command]:
        run = self._running
        if run is None:
            raise self._broken("a result without a running instruction")
        self._running = None
        if event.header is not None:
            self._headers[event.header.g] = replace(event.header, entry=self.version)
        self._account(run)
        sends: list[Command] = [Send(channel, run.g) for channel, _ in run.gives]
        return sends + [Grant(channel) for channel, _ in run.takes]

    def _account(self, run: Run) -> None:
        opcode, header = run.instruction.opcode, self._headers[run.g]
        if opcode == "forward":
            self._forward = run.g + 1
            if header.final or (self.program.window == "batch" and header.ends_batch):
                self._window_end = run.g
        elif opcode == "backward":
            self._backward = run.g + 1
        elif opcode == "update":
            self.version += 1

    def _fire(self) -> list[Command]:
        """Fire the next instruction if it can, passing over updates where no batch ends."""
        while True:
            if self._at >= len(self._block) and not self._next_block():
                self.halted = True
                return [Halt()]
            instruction = self._block[self._at]
            g = self._base + instruction.offset
            if instruction.opcode == "update" and not self._headers[g].ends_batch:
                self._at += 1
                continue
            if not self._ready(instruction):
                return []
            self._running = self._claim(instruction, g)
            self._at += 1
            return [self._running]

    def _ready(self, instruction: Instruction) -> bool:
        """Whether every message is there and every slot free; asked at each event, hence without generators."""
        empty = [channel for channel in instruction.takes if not self.unread[channel]]
        return not empty and not [channel for channel in instruction.gives if not self.credits[channel]]

    def _next_block(self) -> bool:
        """Choose the block to execute next; False when the run is over."""
        end = self._window_end
        if end is not None and self._forward > end:
            if self._backward <= end:
                self._block, self._at, self._base = self.program.drain, 0, self._backward
                return True
            if self._headers[end].final:
                return False
            self._window_start, self._window_end = end + 1, None
        warm = self._forward - self._window_start < self.program.lag
        self._block = self.program.warm_up if warm else self.program.steady
        self._at, self._base = 0, self._forward if warm else self._forward - self.program.lag
        for g in [g for g in self._headers if g < self._backward - 1]:
            del self._headers[g]
        return True

    def _claim(self, instruction: Instruction, g: int) -> Run:
        """Take the messages and slots of an instruction that fires."""
        for channel in instruction.takes:
            if self.unread[channel].popleft() != g:
                raise self._broken(f"a message out of order on channel {channel} for micro-batch {g}")
        for channel in instruction.gives:
            self.credits[channel] -= 1
        header = self._headers.get(g)
        return Run(
            instruction,
            g,
            header,
            self.version,
            *self._reads(instruction, header),
            self._distance(instruction, header),
            tuple((c, self._slot(c)) for c in instruction.takes),
            tuple((c, self._slot(c)) for c in instruction.gives),
        )

    def _distance(self, instruction: Instruction, header: MicroBatch | None) -> int:
        if not instruction.distance or header is None:
            return 0
        far, _, behind = instruction.distance.partition("+")
        if far != "crossed":
            return int(far)
        return header.batch - self.version + (header.index + int(behind or 0)) // header.count

    def _reads(self, instruction: Instruction, header: MicroBatch | None) -> tuple[int, int | None]:
        """The version that is read, and the oldest that a later forward may read."""
        if not instruction.reads or header is None:
            return self.version, None
        if instruction.reads == ENTRY:
            return header.entry, header.entry
        stated = header.batch - (instruction.reads[header.index] == PREVIOUS)
        oldest = header.batch - (PREVIOUS in instruction.reads[header.index + 1 : header.count])
        return max(self._first_version, min(stated, self.version)), max(self._first_version, oldest)

    def _slot(self, channel: int) -> int:
        self._passed[channel] += 1
        return (self._passed[channel] - 1) % self._slots[channel]

    def _broken(self, what: str) -> InternalError:
        return InternalError(
            f"worker {self.program.worker}'s machine ({self.waits_for()})",
            got=what,
            expected="events that its program allows",
            remedy="Report this as a bug of Roundelay, with the plan.",
        )
