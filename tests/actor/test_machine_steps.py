"""The machine event by event, and the events that break its laws."""

from __future__ import annotations

import pytest

from roundelay.actor.machine import (
    Arrived,
    Command,
    Finished,
    Grant,
    Granted,
    Halt,
    Machine,
    Send,
    Start,
)
from roundelay.errors import InternalError
from roundelay.ir.micro_batch import stream
from roundelay.ir.program import Program
from roundelay.lower.emit import emit
from tests.lower.plans import plan_of

HEADERS = stream([1, 1])


def second_of_two() -> Machine:
    """The last stage of two, one slot to a channel, M = 1; channel 0 comes in, channel 1 goes out."""
    return Machine(emit(plan_of("pipedream", 2, 1, slots=1))[1])


def brief(commands: list[Command]) -> list[str]:
    """Commands as text, runs by their own."""
    return [str(command) for command in commands]


def test_commands_come_with_the_event_that_allows_them() -> None:
    machine = second_of_two()
    assert machine.waits_for() == "it has not started"
    assert machine.handle(Start()) == []
    assert brief(machine.handle(Arrived(0, HEADERS[0]))) == ["forward g=0 version=0 takes=0[0]"]
    assert machine.waits_for() == "forward of micro-batch 0 is running"
    assert brief(machine.handle(Finished())) == [str(Grant(0)), "backward g=0 version=0 gives=1[0]"]
    assert brief(machine.handle(Arrived(0, HEADERS[1]))) == []  # early, and kept: one thing at a time
    assert brief(machine.handle(Finished())) == [str(Send(1, 0)), "update g=0 version=0"]
    assert brief(machine.handle(Finished())) == ["forward g=1 version=1 takes=0[0]"]
    assert brief(machine.handle(Finished())) == [str(Grant(0))]
    assert machine.waits_for() == "backward of micro-batch 1 waits for a free slot of channel 1"
    assert brief(machine.handle(Granted(1))) == ["backward g=1 version=1 gives=1[0]"]
    assert brief(machine.handle(Finished())) == [str(Send(1, 1)), "update g=1 version=1"]
    assert machine.handle(Finished()) == [Halt()]
    assert machine.halted
    assert machine.version == 2
    assert machine.handle(Granted(1)) == []


def test_the_first_stage_learns_of_a_micro_batch_by_reading_it() -> None:
    machine = Machine(emit(plan_of("1f1b", 1, 2))[0])
    headers = stream([2])
    assert brief(machine.handle(Start())) == ["read g=0 version=0"]
    assert brief(machine.handle(Finished(headers[0]))) == ["forward g=0 version=0"]
    assert brief(machine.handle(Finished())) == ["backward g=0 version=0"]
    assert brief(machine.handle(Finished())) == ["read g=1 version=0"]  # no update: the batch has not ended


def test_a_message_beyond_the_slots_is_a_broken_law() -> None:
    machine = Machine(emit(plan_of("pipedream", 3, 1, slots=2))[1])
    machine.credits[2] = 0  # so that nothing is taken
    machine.handle(Start())
    for header in stream([1] * 2):
        machine.handle(Arrived(0, header))
    with pytest.raises(InternalError, match="channel 0 with all 2 slots full"):
        machine.handle(Arrived(0, stream([1] * 3)[2]))


def test_a_message_that_is_being_read_still_fills_its_slot() -> None:
    machine = second_of_two()
    machine.handle(Start())
    machine.handle(Arrived(0, HEADERS[0]))
    assert machine.waits_for() == "forward of micro-batch 0 is running"
    with pytest.raises(InternalError, match="channel 0 with all 1 slots full"):
        machine.handle(Arrived(0, HEADERS[1]))


@pytest.mark.parametrize("g", [1, 2])
def test_a_message_out_of_order_is_a_broken_law(g: int) -> None:
    machine = second_of_two()
    machine.handle(Start())
    with pytest.raises(InternalError, match="out of order on channel 0 for micro-batch 0"):
        machine.handle(Arrived(0, stream([1] * 3)[g]))


def test_a_broken_law_names_the_instruction_that_met_it() -> None:
    machine = second_of_two()
    machine.handle(Start())
    with pytest.raises(InternalError) as broken:
        machine.handle(Arrived(0, HEADERS[1]))
    assert "forward of micro-batch 0" in broken.value.subject


def test_a_result_of_nothing_is_a_broken_law() -> None:
    machine = second_of_two()
    machine.handle(Start())
    with pytest.raises(InternalError, match="a result without a running instruction"):
        machine.handle(Finished())


@pytest.mark.parametrize("event", [Arrived(1, HEADERS[0]), Arrived(7, HEADERS[0]), Granted(0), Granted(7), Granted(1)])
def test_an_event_of_a_channel_that_cannot_have_it_is_a_broken_law(event: Arrived | Granted) -> None:
    """A channel that goes out, or another worker's, or a grant for a slot that was never taken."""
    machine = second_of_two()
    machine.handle(Start())
    with pytest.raises(InternalError):
        machine.handle(event)


def test_machines_of_a_printed_program_do_the_same() -> None:
    programs = emit(plan_of("pipeoptim", 1, 2))
    first, second = Machine(programs[0]), Machine(Program.parse(str(programs[0])))
    assert brief(first.handle(Start())) == brief(second.handle(Start()))
