"""What a worker remembers of what it did."""

from __future__ import annotations

from roundelay.actor.machine import Run
from roundelay.ir.program import Instruction
from roundelay.runtime.loading.instruction_log import InstructionLog


def kept(order: list[int], number: int) -> InstructionLog:
    log = InstructionLog(number)
    for at, g in enumerate(order):
        log.add((Run(Instruction("forward", 0, 0), g, None, 0, 0, None, 0, (), (), 0), 0, float(at), float(at), 0))
    return log


def test_the_last_micro_batches_are_kept_and_what_went_is_counted() -> None:
    log = kept([g for g in range(100) for _ in range(3)], 10)
    assert [event[0].g for event in log.events] == [g for g in range(90, 100) for _ in range(3)]
    assert (log.first, log.dropped) == (90, 270)


def test_a_short_run_is_kept_whole() -> None:
    log = kept([0, 1, 0, 2, 1], 3)
    assert [event[0].g for event in log.events] == [0, 1, 0, 2, 1]
    assert (log.first, log.dropped) == (0, 0)


def test_a_backward_far_behind_its_forward_hides_nothing_that_is_whole() -> None:
    log = kept([0, 1, 2, 3, 0, 4, 1, 5, 2, 6, 3], 4)
    whole = [event[0].g for event in log.events if event[0].g >= log.first]
    assert (log.first, whole) == (3, [3, 4, 5, 6, 3])
    assert len(log.events) + log.dropped == 11
