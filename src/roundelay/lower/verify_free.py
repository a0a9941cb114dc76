"""Checks an executed run whose order is free: what holds in every order in which things become possible.

- each stage runs its forwards in the order of the micro-batches, and its backwards too, each after its forward;
- an update follows at once on the last backward of its batch;
- a forward reads the newest weights, and its backward the same;
- no more forwards are in flight than the plan says: an update comes between a forward and its backward at most one time
  less, and never on the last stage.

That a stage's forward comes after those from which it gets values, and its backward after those behind it, is what the
machine waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from roundelay.errors import PlanError
from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.lower.reading import Reading


class Executed(Protocol):
    """One executed instruction, as :class:`roundelay.lower.verify_schedule.Fired`."""

    @property
    def opcode(self) -> str:
        """What it does."""
        ...

    @property
    def g(self) -> int:
        """Its micro-batch."""
        ...

    @property
    def version(self) -> int:
        """Updates that the stage has seen."""
        ...

    @property
    def reads(self) -> int:
        """The version that a forward reads."""
        ...


def check_free_run(reading: Reading, counts: Sequence[int], fired: Sequence[Sequence[Executed]]) -> None:
    """Check the order and the versions of one executed run.

    Args:
        reading: of the plan.
        counts: micro-batches of each batch.
        fired: for each worker, the instructions that its machine has executed.

    Raises:
        PlanError: naming the first stage and micro-batch at which something does not hold.
    """
    headers = {header.g: header for header in stream(list(counts))}
    for worker, executed in enumerate(fired):
        (stage,) = reading.plan.stages_of(worker)
        check = _StageCheck(stage, reading.plan.stages[stage].in_flight, headers)
        for one in executed:
            check.take(one)
        check.end(len(headers))


class _StageCheck:
    """What has been seen of one stage."""

    def __init__(self, stage: int, most: int, headers: dict[int, MicroBatch]) -> None:
        self._stage, self._most, self._headers = stage, most, headers
        self._forwards = self._backwards = self._updates = 0
        self._due = False  # an update

    def take(self, one: Executed) -> None:
        """Check the next instruction."""
        place = f"stage {self._stage}, {one.opcode} of micro-batch {one.g}"
        self._same(place, self._due, one.opcode == "update", "whether an update is due")
        if one.opcode == "forward":
            self._same(place, self._forwards, one.g, "the next one of its stage")
            self._same(place, self._updates, one.reads, "the newest version")
            self._forwards += 1
            if self._forwards - self._backwards > self._most:
                raise _violation(place, f"{self._forwards - self._backwards} in flight", f"at most {self._most}")
        elif one.opcode == "backward":
            self._same(place, self._backwards, one.g, "the next one of its stage")
            if self._backwards == self._forwards:
                raise _violation(place, "no forward of it before", "one")
            self._backwards += 1
            self._due = self._headers[one.g].ends_batch
        elif one.opcode == "update":
            self._same(place, self._updates, one.version, "the newest version")
            self._updates, self._due = self._updates + 1, False

    def end(self, count: int) -> None:
        """Check that nothing is left."""
        self._same(f"stage {self._stage}, at the end", count, self._backwards, "all backwards")
        self._same(f"stage {self._stage}, at the end", False, self._due, "no update that is due")

    @staticmethod
    def _same(place: str, expected: object, got: object, what: str) -> None:
        if expected != got:
            raise _violation(place, str(got), f"{expected}, {what}")


def _violation(place: str, got: str, expected: str) -> PlanError:
    return PlanError(place, got=got, expected=expected, remedy="Report this as a bug of Roundelay, with the plan.")
