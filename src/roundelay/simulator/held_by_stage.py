"""What a simulated worker holds: tapes, halves of backwards and versions of weights, replayed from what it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from roundelay.ir.program import KEPT, Program
from roundelay.simulator.simulation_result import Interval


class StageBytes(Protocol):
    """The sizes of one stage, as a plan has them."""

    @property
    def parameter_bytes(self) -> int:
        """Of its weights."""

    @property
    def tape_bytes(self) -> int:
        """That one forward leaves for its backward."""

    @property
    def owed_bytes(self) -> int:
        """That the first half of a backward leaves for the second."""


_IDLE = ("read", "deal", "box", "unbox", "sum", "share", "grad-norm-sq")
"""Opcodes that hold nothing more or less."""

_AMOUNTS = ("tapes", "owed", "tape_bytes", "weight_bytes", "version_bytes")


def peaks(program: Program, stages: Sequence[StageBytes], intervals: Sequence[Interval]) -> dict[str, int]:
    """The most that a worker holds at one time: tapes, owed halves, bytes of both, of weights and of all versions.

    Args:
        program: the worker's.
        stages: by number.
        intervals: what the worker ran, in order.

    Returns:
        By name; ``versions`` is the most of one stage's.
    """
    held = {number: _HeldByStage(number, stages[number], program) for number in program.stages}
    totals = _Totals(held)
    for interval in intervals:
        own = held[interval.stage]
        if own.is_settled(interval):
            continue
        own.begin(interval)
        totals.note(interval.stage, "tapes")
        own.end_of_backward(interval)
        totals.note(interval.stage, "owed", "tape_bytes")
        own.owed -= interval.opcode == "backward-weight"
        totals.note(interval.stage, "weight_bytes", "version_bytes")
        own.here = own.here and interval.opcode != "pass"
        totals.note(interval.stage)
    return totals.peaks | {"versions": max(stage.versions_peak for stage in held.values())}


class _Totals:
    """What all stages of a worker hold, added up as each of them changes, and the most at one time.

    Args:
        stages: by number.
    """

    def __init__(self, stages: Mapping[int, _HeldByStage]) -> None:
        self._stages = stages
        self._each = {number: stage.amounts for number, stage in stages.items()}
        self._now = {name: sum(own[name] for own in self._each.values()) for name in _AMOUNTS}
        self.peaks = dict.fromkeys(_AMOUNTS, 0)

    def note(self, number: int, *names: str) -> None:
        """Take what a stage holds now; of the amounts that are named the most at one time is wanted."""
        before, now = self._each[number], self._stages[number].amounts
        self._each[number] = now
        for name in _AMOUNTS:
            self._now[name] += now[name] - before[name]
        for name in names:
            self.peaks[name] = max(self.peaks[name], self._now[name])


class _HeldByStage:
    """Tapes and versions that one stage holds, replayed from its intervals in order.

    Args:
        number: of the stage.
        stage: its bytes.
        program: the program of its worker.
    """

    def __init__(self, number: int, stage: StageBytes, program: Program) -> None:
        self.stage, self.halved = stage, program.owed > 0
        wanders = any(instruction.opcode == "pass" for instruction in program.body)
        #: whether the worker has the stage's state
        self.here = not wanders or number in program.holds
        self._others_read = any(i.reads.endswith(KEPT) for i in program.body if i.stage == number)
        read = {instruction.weights for instruction in program.body if not wanders}
        self.stash = "forward" in read
        #: micro-batch in flight to the version and the distance of its forward
        self.tapes: dict[int, tuple[int, int]] = {}
        #: backwards whose second half is pending
        self.owed = 0
        self.versions, self.versions_peak = 1, 0
        self._oldest: int | None = None  # the oldest version that a later forward may read
        #: by opcode, version and distance of the prediction that is kept until the update
        self._predicted: dict[str, tuple[int, int]] = {}
        self._settled: int | None = None  # the version, if the instruction before has changed nothing

    @property
    def amounts(self) -> Mapping[str, int]:
        """All that is held, by name."""
        return {
            "tapes": len(self.tapes),
            "owed": self.owed,
            "tape_bytes": self.tape_bytes,
            "weight_bytes": self.weight_bytes,
            "version_bytes": self.version_bytes,
        }

    @property
    def tape_bytes(self) -> int:
        """Bytes of tapes and of pending second halves."""
        return len(self.tapes) * self.stage.tape_bytes + self.owed * self.stage.owed_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the newest weights, if they are here."""
        return self.stage.parameter_bytes * self.here

    @property
    def version_bytes(self) -> int:
        """Bytes of all versions that are here."""
        return self.weight_bytes * self.versions

    def is_settled(self, interval: Interval) -> bool:
        """Whether neither an instruction nor the one before adds or drops anything, beside what a version entails."""
        opcode, read = interval.opcode, (interval.reads, interval.distance)
        changes = interval.g in self.tapes if opcode == "backward" else opcode not in _IDLE
        if opcode == "forward":
            changes = (self.tapes.get(interval.g), self._oldest) != (read, interval.keep)
        before, self._settled = self._settled, None if changes or interval.distance else interval.version
        return before is not None and before == self._settled

    def begin(self, interval: Interval) -> None:
        """Add the tape of a forward, and count the versions held during the instruction."""
        if interval.opcode == "forward":
            self.tapes[interval.g] = (interval.reads, interval.distance)
            self._oldest = interval.keep
        if interval.distance:
            self._predicted[interval.opcode] = (interval.version, interval.distance)
        newest = interval.version
        self.here = self.here or interval.opcode == "hold"
        if self._others_read:  # which have the tapes
            self._oldest = max(0, newest - 1)
        oldest = newest if self._oldest is None else min(self._oldest, newest)
        held = {(version, 0) for version in range(oldest, newest + 1)}
        held |= set(self.tapes.values()) if self.stash else set()
        held |= set(self._predicted.values())
        self.versions = len(held)
        self.versions_peak = max(self.versions_peak, len(held))
        if interval.opcode == "update":
            self._predicted.clear()

    def end_of_backward(self, interval: Interval) -> None:
        """Remove the tape of a backward; a first half leaves its second half pending."""
        if interval.opcode == "backward" and interval.g in self.tapes:  # the first of its parts
            del self.tapes[interval.g]
            self.owed += self.halved
