"""The machine of a program without an order: what can run does, gradients first (Ravnest, 2024, Algorithm 1).

An *action* is a forward with what precedes it, or a backward with what follows it. It begins when all of its messages
and a slot for each of its results are there, and runs whole. A stage has at most as many forwards in flight as its
program has tapes; so an update comes between a forward and its own backward at most one time less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, final

from roundelay.actor.machine import Machine, Run, described
from roundelay.ir.program import Instruction, Program

Kind = Literal["B", "F"]


@final
class FreeMachine(Machine):
    """Executes the actions of one stage in the order in which they become possible."""

    def __init__(
        self,
        program: Program,
        first_g: int = 0,
        first_version: int = 0,
        in_flight: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(program, first_g, first_version, in_flight)
        start = next(i for i, line in enumerate(program.body) if line.opcode == "backward")
        self._actions: dict[Kind, tuple[Instruction, ...]] = {"B": program.body[start:], "F": program.body[:start]}
        self._next: dict[Kind, int] = {"B": first_g, "F": first_g}  # micro-batch of the next one
        self._g = first_g  # micro-batch of the action that has begun
        self._left: list[Instruction] = []  # of that action

    def fire(self) -> Run | None:
        """Start the next instruction and return it; None while one is running or none can run.

        After the last instruction the machine is :attr:`halted`.
        """
        if self._running is not None or self.halted:
            return None
        if not self._left:
            self._begin()
        if not self._left:
            return None
        self._running = self._start(self._left.pop(0), self._g)
        return self._running

    def _begin(self) -> None:
        """Begin an action, if one is possible."""
        self.wants_credit = False
        self.halted = self._next["B"] > self._last
        for kind, lines in self._actions.items():
            if self._is_due(kind) and self._is_possible(kind):
                self._g = self._next[kind]
                self._next[kind] += 1
                self._headers.pop(self._next["B"] - 2, None)  # the update of the last one has run
                self._left = [line for line in lines if not line.once_a_batch or self._headers[self._g].ends_batch]
                return

    def _is_due(self, kind: Kind) -> bool:
        ahead = self._next["F"] - self._next["B"]
        return ahead > 0 if kind == "B" else ahead < self.program.tapes and self._next["F"] <= self._last

    def _is_possible(self, kind: Kind) -> bool:
        """Whether all messages of an action are there, and a slot for each of its results."""
        g, lines = self._next[kind], self._actions[kind]
        if not all(self._holds(channel, g) for line in lines for channel in line.takes):
            return False
        free = all(self.credits[self._credit(channel, g)] for line in lines for channel in line.gives)
        self.wants_credit |= not free
        return free

    def waits_for(self) -> str:
        """Describe what the machine waits for, for error messages."""
        if text := self._running_text():
            return text
        return "; ".join([self._waiting(kind) for kind in self._actions if self._is_due(kind)]) or "nothing is due"

    def _waiting(self, kind: Kind) -> str:
        g, lines = self._next[kind], self._actions[kind]
        missing = [text for line in lines for text in self._missing(line, g)]
        return f"{described(lines[-1 if kind == 'F' else 0], g)} waits for {', '.join(missing) or 'nothing'}"
