"""The machine event by event, and the events that break its laws."""

from __future__ import annotations

import pytest

from roundelay.actor.loop import LoopMachine
from roundelay.errors import InternalError
from roundelay.ir.micro_batch import stream
from roundelay.ir.program import Program
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from tests.lower.plans import plan_of

HEADERS = stream([1, 1])


def second_of_two() -> LoopMachine:
    """The last stage of two, one slot to a channel, M = 1; channel 0 comes in, channel 1 goes out."""
    return LoopMachine(emit(read(plan_of("pipedream", 2, 1, slots=1)))[1])


def fired(machine: LoopMachine) -> str:
    """What it fires, as text; empty for nothing."""
    run = machine.fire()
    return "" if run is None else str(run)


def test_an_instruction_fires_with_the_event_that_allows_it() -> None:
    machine = second_of_two()
    assert machine.waits_for() == "forward of micro-batch 0 on stage 1 waits for message 0 on channel 0"
    assert fired(machine) == ""
    machine.arrive(0, HEADERS[0])
    assert fired(machine) == "forward g=0 stage=1 version=0 takes=0[0]"
    assert machine.waits_for() == "forward of micro-batch 0 on stage 1 is running"
    assert fired(machine) == ""  # one thing at a time
    machine.finish()
    assert fired(machine) == "backward g=0 stage=1 version=0 gives=1[0]"
    machine.arrive(0, HEADERS[1])  # early, and kept
    assert fired(machine) == ""
    machine.finish()
    assert fired(machine) == "update g=0 stage=1 version=0"
    machine.finish()
    assert fired(machine) == "forward g=1 stage=1 version=1 takes=0[0]"
    machine.finish()
    assert fired(machine) == ""
    assert machine.waits_for() == "backward of micro-batch 1 on stage 1 waits for a free slot of channel 1"
    machine.grant(1)
    assert fired(machine) == "backward g=1 stage=1 version=1 gives=1[0]"
    machine.finish()
    assert fired(machine) == "update g=1 stage=1 version=1"
    machine.finish()
    assert not machine.halted
    assert fired(machine) == ""
    assert machine.halted
    assert machine.version == 2
    machine.grant(1)
    assert fired(machine) == ""


def test_the_machine_says_whether_a_free_slot_is_what_it_lacks() -> None:
    machine = second_of_two()
    assert fired(machine) == ""
    assert not machine.wants_credit  # a message is what it lacks
    for header in HEADERS:
        machine.arrive(0, header)
        while machine.fire():
            machine.finish()
    assert machine.waits_for() == "backward of micro-batch 1 on stage 1 waits for a free slot of channel 1"
    assert machine.wants_credit
    machine.grant(1)
    assert fired(machine) != ""
    assert not machine.wants_credit


def test_the_first_stage_learns_of_a_micro_batch_by_reading_it() -> None:
    machine = LoopMachine(emit(read(plan_of("1f1b", 1, 2)))[0])
    header = stream([2])[0]
    assert fired(machine) == "read g=0 stage=0 version=0"
    machine.finish(header)
    assert machine.header(0) == header
    shown = []
    while len(shown) < 3:
        shown.append(fired(machine))
        machine.finish()
    # no update in between: the batch has not ended
    assert shown == ["forward g=0 stage=0 version=0", "backward g=0 stage=0 version=0", "read g=1 stage=0 version=0"]


def test_what_is_done_with_is_forgotten() -> None:
    machine = second_of_two()
    for header in stream([1] * 6):
        machine.arrive(0, header)
        while machine.fire():
            machine.finish()
        machine.grant(1)
        while machine.fire():
            machine.finish()
    assert [g for g in range(6) if machine.header(g)] == []


def test_a_message_beyond_the_slots_is_a_broken_law() -> None:
    machine = LoopMachine(emit(read(plan_of("pipedream", 3, 1, slots=2)))[1])
    machine.credits[2] = 0  # so that nothing is taken
    assert machine.fire() is None
    for header in stream([1] * 2):
        machine.arrive(0, header)
    with pytest.raises(InternalError, match="channel 0 with all 2 slots full"):
        machine.arrive(0, stream([1] * 3)[2])


def test_a_message_that_is_being_read_still_fills_its_slot() -> None:
    machine = second_of_two()
    machine.arrive(0, HEADERS[0])
    assert fired(machine)
    assert machine.waits_for() == "forward of micro-batch 0 on stage 1 is running"
    with pytest.raises(InternalError, match="channel 0 with all 1 slots full"):
        machine.arrive(0, HEADERS[1])


@pytest.mark.parametrize("g", [1, 2])
def test_a_message_out_of_order_is_a_broken_law(g: int) -> None:
    machine = second_of_two()
    assert machine.fire() is None
    machine.arrive(0, stream([1] * 3)[g])
    with pytest.raises(InternalError, match="out of order on channel 0 for micro-batch 0"):
        machine.fire()


def test_a_broken_law_names_the_instruction_that_met_it() -> None:
    machine = second_of_two()
    assert machine.fire() is None
    machine.arrive(0, HEADERS[1])
    with pytest.raises(InternalError) as broken:
        machine.fire()
    assert "forward of micro-batch 0" in broken.value.subject


def test_a_result_of_nothing_is_a_broken_law() -> None:
    machine = second_of_two()
    assert machine.fire() is None
    with pytest.raises(InternalError, match="a result without a running instruction"):
        machine.finish()


@pytest.mark.parametrize("channel", [1, 7])
def test_a_message_on_a_channel_that_goes_elsewhere_is_a_broken_law(channel: int) -> None:
    with pytest.raises(InternalError, match="which it does not take from"):
        second_of_two().arrive(channel, HEADERS[0])


@pytest.mark.parametrize("channel", [0, 7, 1])
def test_a_grant_that_cannot_be_is_a_broken_law(channel: int) -> None:
    """Of a channel that comes in, of another worker's, or for a slot that was never taken."""
    with pytest.raises(InternalError, match="none of which it has filled"):
        second_of_two().grant(channel)


def test_machines_of_a_printed_program_do_the_same() -> None:
    programs = emit(read(plan_of("pipeoptim", 1, 2)))
    first, second = LoopMachine(programs[0]), LoopMachine(Program.parse(str(programs[0])))
    assert fired(first) == fired(second) != ""


DEALER = """\
worker 0 of 3
loop every 1 over slots
tapes 4
channel 0 forward 0.0>1.1,2.1 slots 1
body
  forward 0 g gives 0
"""

TAKER = """\
worker 2 of 3
loop every 1 over slots
tapes 4
channel 0 forward 0.0,1.0>2.1 slots 2
body
  forward 1 g takes 0
"""


def test_a_dealt_slot_is_counted_at_the_target_whose_turn_it_is() -> None:
    machine, headers = LoopMachine(Program.parse(DEALER)), stream([4])
    for header in headers[:2]:
        machine._know(header)
        assert machine.fire() is not None
        machine.finish()
    machine._know(headers[2])
    machine.grant(0, 2)
    assert machine.fire() is None  # the second target's slot is free, but it is the first one's turn
    assert machine.wants_credit
    machine.grant(0, 1)
    assert (run := machine.fire()) is not None
    assert run.g == 2
    with pytest.raises(InternalError, match="none of which it has filled"):
        machine.grant(0, 2)


def test_senders_of_a_dealt_channel_may_overtake_each_other() -> None:
    machine, headers = LoopMachine(Program.parse(TAKER)), stream([4])
    machine.arrive(0, headers[1])
    assert machine.fire() is None
    assert "message 0 on channel 0" in machine.waits_for()
    machine.arrive(0, headers[0])
    for header in headers[:2]:
        assert (run := machine.fire()) is not None
        assert run.g == header.g
        machine.finish()


def test_only_the_source_whose_message_fills_a_slot_next_may_send_it() -> None:
    channel = Program.parse(TAKER).channels[0]
    assert [channel.source_of(g).worker for g in range(4)] == [0, 1, 0, 1]
    assert [channel.refilled_by(g).worker for g in range(4)] == [0, 1, 0, 1]  # two slots at one target
    dealt = Program.parse(TAKER.replace("slots 2", "slots 1")).channels[0]
    assert [dealt.refilled_by(g).worker for g in range(4)] == [1, 0, 1, 0]
