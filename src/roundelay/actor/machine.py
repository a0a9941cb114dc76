"""The machine that executes one worker's program. It performs no I/O and knows no clock.

A driver (the runtime's worker with a transport, or the simulator with a virtual clock) reports events to it and gets
the next instruction from it. An instruction fires when the messages that it takes have arrived and the channels that it
gives to have a free slot; until :meth:`Machine.finish` nothing else fires. What comes next is for the order of the
program to say: :class:`roundelay.actor.loop.LoopMachine`, or :class:`roundelay.actor.free.FreeMachine`.

::

    arrive(channel, header) ──┐
    grant(channel) ───────────┼──►  Machine  ──► fire() -> Run(opcode, g, version, distance, slots), or None
    finish(header) ───────────┘

When an instruction is done, the driver sends its results to every channel in ``Run.gives``, and then grants a slot of
every channel in ``Run.takes`` to its producer: the two messages of OneFlow's actors, *req* and *ack* (Sect. 4.1). For a
channel between two stages of this worker, the driver calls ``arrive`` and ``grant`` of this same machine.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, final

from roundelay.errors import InternalError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.program import ENTRY, KEPT, PREVIOUS, STATES, SUMS, Channel, Instruction, Program

UNKNOWN = sys.maxsize
"""The last micro-batch of a window, until a header marks it as the last."""


@final
class Run(NamedTuple):
    """An instruction to execute; a tuple because that is cheap to create, and a worker creates four per micro-batch.

    Args:
        instruction: the line of the program.
        g: micro-batch.
        header: header of that micro-batch; None for a ``read``.
        version: updates that the stage's weights have seen.
        reads: for a forward, and what gathers its weights, the version that it reads; else ``version``.
        keep: for a forward, the oldest version that a later one may read; None if all read the newest.
        distance: the number of updates to predict ahead.
        takes: (channel, slot) of each message it consumes.
        gives: (channel, slot) of each message it sends.
        stage: the stage that it acts on.
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
    stage: int

    def __str__(self) -> str:
        words = [f"{self.instruction.opcode} g={self.g}"]
        words += [f"stage={self.stage}", f"version={self.version}"]
        if self.instruction.reads:
            words.append(f"reads={self.reads}")
        if self.instruction.distance:
            words.append(f"distance={self.distance}")
        words += [f"takes={c}[{slot}]" for c, slot in self.takes] + [f"gives={c}[{slot}]" for c, slot in self.gives]
        return " ".join(words)


class Machine(ABC):
    """Executes one program.

    Args:
        program: the program to execute.
        first_g: number of the first micro-batch (more than 0 when a run is resumed).
        first_version: updates that the weights have seen before the run.
        in_flight: for a run resumed with micro-batches in flight, whose forwards are redone: micro-batch to the version
            at its first forward. None if it starts with empty stages.
    """

    def __init__(
        self,
        program: Program,
        first_g: int = 0,
        first_version: int = 0,
        in_flight: Mapping[int, int] | None = None,
    ) -> None:
        self.program = program
        #: updates that the weights of each stage have seen
        self.versions = dict.fromkeys(program.stages, first_version)
        self._dealt = {c.id: c for c in program.channels if c.dealt}
        #: free slots at the consumer, for each channel given to; where it is dealt, for each target, by its worker
        self.credits: dict[int | tuple[int, int], int] = {
            c.id: c.slots for c in program.channels if c.filled_by(program.worker) and not c.dealt
        }
        for channel in self._dealt.values():
            self.credits |= _first_credits(channel, program.worker, first_g)
        #: micro-batches whose message is here and unread, for each channel taken from
        self.unread: dict[int, deque[int]] = {c.id: deque() for c in program.channels if c.read_by(program.worker)}
        self._slots = {c.id: c.slots for c in program.channels}
        self._passed = dict.fromkeys(self._slots, 0)  # messages taken or given so far, for the slot's number
        self._headless = {c.id for c in program.channels if c.kind in (*SUMS, *STATES)}
        self._arrived: dict[tuple[int, int], int] = {}  # updates that a state has seen, by channel and message
        self._headers: dict[int, MicroBatch] = {}
        self._ends: dict[int, MicroBatch] = {}  # in a window of slots: of batches, by their last micro-batch
        self._first_version = 0 if in_flight is not None else first_version  # the oldest that a forward can read
        self._redone = dict(in_flight or {})
        self._first, self._last = first_g, UNKNOWN  # micro-batches of the window
        self._running: Run | None = None
        self.halted = False
        #: forwards whose backward has not run yet
        self.in_flight = 0
        #: whether the last :meth:`fire` returned None for want of a free slot
        self.wants_credit = False

    def arrive(self, channel: int, header: MicroBatch) -> None:
        """A message of the micro-batch has arrived on ``channel``; messages of one channel arrive in order."""
        unread = self.unread.get(channel)
        if unread is None:
            raise self._bug(f"a message on channel {channel}, which it does not take from")
        in_use = self._running is not None and channel in self._running.instruction.takes
        if len(unread) + in_use >= self._slots[channel]:
            raise self._bug(f"a message on channel {channel} with all {self._slots[channel]} slots full")
        unread.append(header.g)
        if channel not in self._headless:  # whose headers are of another holder's micro-batch, or of none
            self._know(self._headers.get(header.g, header))
        else:
            self._arrived[channel, header.g] = header.entry

    def grant(self, channel: int, worker: int = -1) -> None:
        """The consumer of ``channel``, or, if it is dealt, one of them, has freed a slot."""
        key = (channel, worker) if channel in self._dealt else channel
        if self.credits.get(key, self._slots.get(channel)) == self._slots.get(channel):
            raise self._bug(f"a free slot of channel {channel}, none of which it has filled")
        self.credits[key] += 1

    def finish(self, header: MicroBatch | None = None) -> None:
        """The running instruction is done; after a ``read``, ``header`` is that of the micro-batch."""
        run, self._running = self._running, None
        if run is None:
            raise self._bug("a result without a running instruction")
        if header is not None and run.instruction.opcode == "read":
            self._know(header._replace(entry=run.version))
        opcode = run.instruction.opcode
        if opcode == "forward" and run.instruction.runs_first:
            self.in_flight += 1
            known = self._headers[run.g]
            if known.final or (self.program.over == "batch" and known.ends_batch):
                self._last = known.end
        elif opcode == "backward" and run.instruction.runs_first:
            self.in_flight -= 1
        elif opcode == "update":
            self.versions[run.stage] += 1

    @abstractmethod
    def fire(self) -> Run | None:
        """Start the next instruction and return it; None while one is running or none can run.

        After the last instruction the machine is :attr:`halted`.
        """

    @abstractmethod
    def waits_for(self) -> str:
        """Describe what the machine waits for, for error messages."""

    def _ends_batch(self, g: int) -> bool:
        """Whether a micro-batch is the last of its batch."""
        return g in self._ends or (self.program.over != "slots" and self._headers[g].ends_batch)

    def _holds(self, channel: int, g: int) -> bool:
        """Whether the next message is here: that of micro-batch g, where senders may overtake each other."""
        unread = self.unread[channel]
        return g in unread if channel in self._dealt else bool(unread)

    def _credit(self, channel: int, g: int) -> int | tuple[int, int]:
        """What counts the free slots for the message of micro-batch g."""
        dealt = self._dealt.get(channel)
        return channel if dealt is None else (channel, dealt.target_of(g).worker)

    def _know(self, header: MicroBatch) -> None:
        """Keep a header; in a window of slots, also one for the end of its batch, which may be another worker's."""
        self._headers[header.g] = header
        if self.program.over == "slots":
            self._ends.setdefault(header.end, header._replace(g=header.end, index=header.count - 1))

    def header(self, g: int) -> MicroBatch | None:
        """Return the header of a micro-batch; None if it has not arrived or is done with."""
        return self._headers.get(g)

    @property
    def version(self) -> int:
        """Updates that the weights of every stage of this worker have seen."""
        return min(self.versions.values())

    def _missing(self, instruction: Instruction, g: int) -> list[str]:
        """Describe what an instruction waits for."""
        missing = [f"message {g} on channel {c}" for c in instruction.takes if not self._holds(c, g)]
        full = [c for c in instruction.gives if not self.credits[self._credit(c, g)]]
        return missing + [f"a free slot of channel {c}" for c in full]

    def _running_text(self) -> str:
        """Describe the running instruction, or the end of the program; empty if neither."""
        if self._running is not None:
            return f"{described(self._running.instruction, self._running.g)} is running"
        return "the program has ended" if self.halted else ""

    def _start(self, instruction: Instruction, g: int) -> Run:
        """Take the messages and slots of an instruction that fires, and determine its version and distance."""
        for channel in instruction.takes:
            if channel in self._dealt:
                self.unread[channel].remove(g)
            elif self.unread[channel].popleft() != g:
                raise self._bug(f"a message out of order on channel {channel} for micro-batch {g}")
        for channel in instruction.gives:
            self.credits[self._credit(channel, g)] -= 1
        takes, gives = self._next_slots(instruction.takes), self._next_slots(instruction.gives)
        if instruction.opcode == "hold":
            self.versions[instruction.stage] = self._arrived[instruction.takes[0], g]
        for channel in instruction.takes:
            self._arrived.pop((channel, g), None)
        header = self._headers.get(g) or self._ends.get(g)
        version = self.versions[instruction.stage]
        if self._redone and (instruction.opcode == "read" or instruction.reads_forward):
            version = self._redone.get(g, version)
        reads: tuple[int, int | None] = version, None
        if instruction.reads and header is not None:
            reads = self._reads(instruction.reads, header, version)
        distance = 0
        if instruction.distance and header is not None:
            distance = self._distance(instruction.distance, header, version)
        return Run(instruction, g, header, version, *reads, distance, takes, gives, instruction.stage)

    def _distance(self, distance: str, header: MicroBatch, version: int) -> int:
        crossed, number = _parsed(distance)
        return header.batch - version + (header.index + number) // header.count if crossed else number

    def _reads(self, reads: str, header: MicroBatch, version: int) -> tuple[int, int]:
        """Return the version that is read, and the oldest that a later forward may read."""
        if reads == ENTRY:
            return header.entry, header.entry
        stated = header.batch - (reads[header.index] == PREVIOUS)
        oldest = header.batch - (PREVIOUS in reads[header.index + 1 : header.count])
        if reads.endswith(KEPT):
            oldest = min(oldest, version - 1)
        return max(self._first_version, min(stated, version)), max(self._first_version, oldest)

    def _next_slots(self, channels: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return (channel, slot) of the next message of each channel."""
        if not channels:
            return ()
        passed, slots = self._passed, self._slots
        following = tuple([(channel, passed[channel] % slots[channel]) for channel in channels])
        for channel in channels:
            passed[channel] += 1
        return following

    def _bug(self, event: str) -> InternalError:
        return InternalError(
            f"worker {self.program.worker}'s machine ({self.waits_for()})",
            got=event,
            expected="events that its program allows",
            remedy="Report this as a bug of Roundelay, with the plan.",
        )


def _first_credits(channel: Channel, worker: int, first_g: int) -> dict[int | tuple[int, int], int]:
    """The slots that one of the sources of a dealt channel may fill before any is granted, by target."""
    credits: dict[int | tuple[int, int], int] = {}
    if channel.filled_by(worker):
        credits = {(channel.id, port.worker): 0 for port in channel.targets}
        for g in range(first_g, first_g + channel.slots * len(channel.targets)):
            credits[channel.id, channel.target_of(g).worker] += channel.source_of(g).worker == worker
    return credits


def described(instruction: Instruction, g: int) -> str:
    """Describe an instruction and what it acts on, for error messages."""
    return f"{instruction.opcode} of micro-batch {g} on stage {instruction.stage}"


@cache
def _parsed(distance: str) -> tuple[bool, int]:
    """Parse a distance: ``crossed+2`` as (True, 2), ``3`` as (False, 3)."""
    base, _, added = distance.partition("+")
    return (True, int(added or 0)) if base == "crossed" else (False, int(base))
