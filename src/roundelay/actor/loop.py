"""The machine of a program whose loop says the order: it depends on the micro-batches, and never on timing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from roundelay.actor.machine import UNKNOWN, Machine, Run, described
from roundelay.ir.program import Instruction, Program


@final
class LoopMachine(Machine):
    """Executes the body of a program turn by turn; see :mod:`roundelay.ir.program`."""

    def __init__(
        self,
        program: Program,
        first_g: int = 0,
        first_version: int = 0,
        in_flight: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(program, first_g, first_version, in_flight)
        within = {c.id: c.within for c in program.channels}
        self._lines = [(i, *_bounds(i, within)) for i in program.body]  # with how far beyond the window each acts
        self._first_turn = -(max(i.offset - first for i, first, _ in self._lines) // program.every)
        self._least_offset = min(i.offset - last for i, _, last in self._lines)
        self._origin = first_g - first_g % program.every if program.over == "slots" else first_g  # offsets count from
        self._turn, self._line = self._first_turn, 0

    def fire(self) -> Run | None:
        """Start the next instruction and return it; None while one is running or none can run.

        A line is skipped if its micro-batch lies outside of the window, or if it acts once a batch and no batch ends
        there. After the last instruction the machine is :attr:`halted`.
        """
        self.wants_credit = False
        if self._running is not None or self.halted:
            return None
        while True:
            if self._line == len(self._lines) and not self._next_turn():
                self.halted = True
                return None
            instruction, first, last = self._lines[self._line]
            g = self._number(instruction)
            if not self._first + first <= g <= self._last + last or (
                instruction.once_a_batch and not self._ends_batch(g)
            ):
                self._line += 1
                continue
            for channel in instruction.takes:
                if not self._holds(channel, g):
                    return None
            for channel in instruction.gives:
                if not self.credits[self._credit(channel, g)]:
                    self.wants_credit = True
                    return None
            self._running = self._start(instruction, g)
            self._line += 1
            return self._running

    def _next_turn(self) -> bool:
        """Begin the next turn of the loop, or the first one of the next window; False when the run is over."""
        self._turn, self._line = self._turn + 1, 0
        oldest = self._origin + self._turn * self.program.every + self._least_offset  # on which a line still acts
        over = oldest > self._last
        final = over and bool((self._ends.get(self._last) or self._headers[self._last]).final)
        for g in range(max(self._first, oldest - self.program.every), min(oldest, self._last + 1)):
            self._headers.pop(g, None)
            self._ends.pop(g, None)
        if over:
            self._first, self._last, self._turn = self._last + 1, UNKNOWN, self._first_turn
            self._origin = self._first
        return not final

    def _number(self, instruction: Instruction) -> int:
        """The micro-batch on which an instruction acts in this turn."""
        return self._origin + self._turn * self.program.every + instruction.offset

    def waits_for(self) -> str:
        """Describe what the machine waits for, for error messages."""
        if text := self._running_text():
            return text
        if self._line == len(self._lines):
            return "the next turn of its loop is due"
        instruction = self.program.body[self._line]
        g = self._number(instruction)
        return f"{described(instruction, g)} waits for {', '.join(self._missing(instruction, g)) or 'nothing'}"


def _bounds(instruction: Instruction, within: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """How far beyond the first and the last micro-batch of the window an instruction acts: as far as its channels."""
    beyond = [within[channel] for channel in (*instruction.takes, *instruction.gives)] or [(0, 0)]
    return beyond[0]
