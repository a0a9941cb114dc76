"""The seconds of a run, and nothing else of it: what :func:`roundelay.simulator.simulate` says, in a part of the time.

The same machines run on the same clock, with two changes that keep every time. At most two holders of each stage run
(:mod:`roundelay.lower.alike_holders`). And lines that use no channel but those of exchanges among these are one
instruction of the machine: nothing else can come between them, so their times follow from those at which the holders
begin them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.program import Instruction, Program
from roundelay.lower.alike_holders import with_holders
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
    if reading.form is None and not (reading.needs_norm and reading.mesh.size > 2):
        try:
            return _of_two(plan, reading, micro_batches)
        except _FirstIsLaterError:
            pass
    return simulate(plan, emit(reading), micro_batches).makespan_s


def _of_two(plan: Plan, reading: Reading, micro_batches: Sequence[MicroBatch]) -> float:
    fewer = read(with_holders(plan, 2)) if reading.mesh.size > 2 else reading
    clock = _FoldedClock(plan, fewer, emit(fewer), micro_batches)
    clock.run()
    return max(end_s for *_, end_s in clock.ended)


class _FirstIsLaterError(Exception):
    """A first holder begins an exchange after another, so that the others do not run alike."""


_Step = tuple[str, int, float]
"""``box`` or ``unbox`` and its channel; or a computation, and its seconds."""

_FOLDED = ("forward", "backward", "backward-weight", "box", "unbox")


@dataclass(frozen=True, slots=True)
class _Folded(Instruction):
    """Lines that use exchanges only, as one instruction.

    Args:
        steps: the lines.
        place: in the program; the same on each holder.
    """

    steps: tuple[_Step, ...] = ()
    place: int = 0


class _FoldedClock(Clock):
    """The clock of programs whose lines are folded."""

    def __init__(
        self, plan: Plan, structure: Reading, programs: Sequence[Program], micro_batches: Sequence[MicroBatch]
    ) -> None:
        super().__init__(plan, structure, programs, micro_batches, [None] * len(programs))
        self._size, self._alike = structure.mesh.size, plan.grid.size > structure.mesh.size
        self._begun: dict[tuple[int, int, int], list[tuple[int, Run, float]]] = {}
        self._complete: dict[int, float] = {}  # by channel of an exchange

    def prepared(self, program: Program) -> Program:
        """The program with its lines folded."""
        body: list[Instruction] = []
        exchanges = {channel.id for channel in program.channels if channel.phases}
        for key, group in groupby(self._apart(program, exchanges), key=lambda one: one[0]):
            own = list(group)
            if key is None:
                body += [line for _, line, _ in own]
                continue
            faces = [line for _, line, _ in own]
            face = next((line for line in faces if line.opcode == "forward" and line.runs_first), faces[0])
            what = face.opcode, face.stage, face.offset
            steps = tuple([step for *_, step in own])
            body.append(_Folded(*what, of=face.of, segments=face.segments, steps=steps, place=len(body)))
        return replace(program, body=tuple(body))

    def _apart(self, program: Program, exchanges: Set[int]) -> Iterator[tuple[Any, Instruction, _Step]]:
        """The lines, each with what those of one fold have in common, or None; exchanges are lines of their own."""
        for line in program.body:
            key = (line.stage, line.offset, line.once_a_batch) if line.opcode in _FOLDED else None
            if not line.takes and not line.gives:
                yield key, line, ("", 0, self.seconds_of(program, line))
                continue
            unboxes, boxes = ([c for c in own if c in exchanges] for own in (line.takes, line.gives))
            yield from ((key, line, ("unbox", channel, 0.0)) for channel in unboxes)
            if len(unboxes) + len(boxes) < len(line.takes) + len(line.gives):
                takes, gives = ([c for c in own if c not in exchanges] for own in (line.takes, line.gives))
                yield None, replace(line, takes=tuple(takes), gives=tuple(gives)), ("", 0, 0.0)
            yield from ((key, line, ("box", channel, 0.0)) for channel in boxes)

    def begin(self, worker: int, run: Run) -> None:
        """Folded lines take their times when every holder has begun them."""
        line = run.instruction
        if not isinstance(line, _Folded):
            super().begin(worker, run)
            return
        begun = self._begun.setdefault((line.stage, line.place, run.g), [])
        begun.append((worker, run, self.now))
        if len(begun) == self._size:
            begun = sorted(self._begun.pop((line.stage, line.place, run.g)), key=lambda one: one[0])
            ends = self._through(line.steps, [start_s for *_, start_s in begun])
            for (holder, own, start_s), end_s in zip(begun, ends, strict=True):
                self.push(end_s, holder, partial(self.finish, holder, own, start_s))

    def _through(self, steps: Sequence[_Step], times: list[float]) -> list[float]:
        """When the holders end folded lines that they begin at ``times``."""
        for what, channel, seconds in steps:
            if what == "box":
                last = max(times)
                if self._alike and times[-1] < last:
                    raise _FirstIsLaterError
                self._complete[channel] = last + self.exchange_s[channel]
            elif what == "unbox":
                complete = self._complete[channel]
                times = [max(at, complete) for at in times]
            else:
                times = [at + seconds for at in times]
        return times
