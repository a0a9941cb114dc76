"""Writes down what a stage whose order is free does: letters and digests (:mod:`roundelay.observe.action_trace`)."""

from __future__ import annotations

import time
from typing import final

from roundelay.observe.action_trace import EVERY, LETTERS
from roundelay.observe.digest import digest
from roundelay.runtime.processes.worker_messages import Report, Reporter
from roundelay.runtime.stage_state import Stage

SECONDS = 1.0
"""After so many seconds letters are reported, though no digest is due."""


@final
class ActionRecorder:
    """Reports the letters of one stage.

    Args:
        worker: number of the worker.
        stage: the stage's state.
        report: called with reports to the launcher.
    """

    def __init__(self, worker: int, stage: Stage, report: Reporter) -> None:
        self._worker, self._stage, self._report = worker, stage, report
        self._count, self._letters = 0, ""
        self._digests: dict[int, str] = {}  # not reported yet
        self._last = 0  # letters before the last digest
        self._reported = time.monotonic()

    def begin(self, opcode: str) -> None:
        """Note an instruction before it is executed; others than forwards and backwards belong to these."""
        if opcode in LETTERS:
            if self._count and not self._count % EVERY:
                self.take_digest()
            elif time.monotonic() - self._reported > SECONDS:
                self._send()
            self._count += 1
            self._letters += LETTERS[opcode]

    def take_digest(self) -> None:
        """Report a digest of the stage as it is now, if there is none yet."""
        if self._count > self._last:
            self._digests[self._count], self._last = digest(self._stage.state_tensors()), self._count
            self._send()

    def end(self) -> None:
        """Report what is left, and that the run has come to its end."""
        self.take_digest()
        self._send(ended=True)

    def _send(self, *, ended: bool = False) -> None:
        digests = [[count, found] for count, found in self._digests.items()]
        data = {"stage": self._stage.spec.stage, "letters": self._letters, "digests": digests, "ended": ended}
        self._report(Report("letters", self._worker, data))
        self._letters, self._digests, self._reported = "", {}, time.monotonic()
