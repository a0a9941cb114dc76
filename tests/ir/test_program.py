"""A program's text: read as printed, and refused, with its line, when no program prints so."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.exchange import all_gather, all_reduce, all_to_all
from roundelay.ir.plan import Plan
from roundelay.ir.program import Channel, Instruction, Port, Program
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from tests.ir.garbled import garbled
from tests.lower.plans import FEW, RULES, edge_of, plan_of, plans

NUMBERS = st.integers(0, 10**9)
IDS = st.lists(NUMBERS, max_size=3).map(tuple)
PORTS = st.builds(Port, NUMBERS, NUMBERS)
CHANNELS = st.builds(
    Channel,
    NUMBERS,
    st.sampled_from(["data", "forward", "gradient", "weight-gradient", "grad-norm-sq", "grad-norm"]),
    st.lists(PORTS, min_size=1, max_size=3).map(tuple),
    st.lists(PORTS, min_size=1, max_size=3).map(tuple),
    NUMBERS,
    st.sampled_from([(), all_reduce(1), all_gather(2), all_to_all(0, 1)]),
)
INSTRUCTIONS = st.builds(
    Instruction,
    opcode=st.sampled_from(
        ["read", "forward", "backward", "backward-weight", "box", "unbox", "grad-norm-sq", "update"]
    ),
    stage=NUMBERS,
    offset=st.integers(-9, 9),
    takes=IDS,
    gives=IDS,
    weights=st.sampled_from(["", "forward", "live"]),
    distance=st.sampled_from(["", "crossed"]) | NUMBERS.map(str),
    mode=st.sampled_from(["", "stash", "recompute", "mixed"]),
)
PROGRAMS = st.builds(
    Program,
    worker=NUMBERS,
    num_workers=NUMBERS,
    every=st.integers(1, 9),
    over=st.sampled_from(["batch", "run"]),
    tapes=NUMBERS,
    owed=NUMBERS,
    registers=NUMBERS,
    channels=st.lists(CHANNELS, max_size=3).map(tuple),
    body=st.lists(INSTRUCTIONS, max_size=4).map(tuple),
)
TEXT = str(emit(read(plan_of("pipeoptim", 3, 2, skips=[edge_of(0, 2, gradient=False)], backward="recompute")))[0])
LINES = TEXT.splitlines()


@FEW
@given(PROGRAMS)
def test_a_program_is_read_as_it_is_printed(program: Program) -> None:
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_stages", range(1, 7))
def test_an_emitted_program_is_read_as_it_is_printed(rule: str, num_stages: int) -> None:
    for micro_batches in range(1, 6):
        programs = emit(read(plan_of(rule, num_stages, micro_batches)))
        assert [Program.parse(str(program)) for program in programs] == list(programs)


@FEW
@given(plans())
def test_an_emitted_program_with_skipping_edges_is_read_as_it_is_printed(plan: Plan) -> None:
    programs = emit(read(plan))
    assert [Program.parse(str(program)) for program in programs] == list(programs)


def test_the_text_names_every_part() -> None:
    assert LINES == [
        "worker 0 of 3",
        "loop every 1 over run",
        "tapes 3",
        "registers 2",
        "channel 0 forward 0.0>1.1 slots 2",
        "channel 1 gradient 1.1>0.0 slots 2",
        "channel 2 forward 0.0>2.2 slots 2",
        "body",
        "  read 0 g+2",
        "  forward 0 g+2 gives 0,2 distance crossed mode recompute",
        "  backward 0 g takes 1 weights live mode recompute",
        "  update 0 g",
    ]


def refusal_of(text: str) -> str:
    """What the refusal of a program's text is about; empty if it is read."""
    try:
        Program.parse(text)
    except PlanError as error:
        return error.subject
    return ""


@given(garbled(TEXT))
def test_a_garbled_program_is_refused_with_a_line_and_never_otherwise(text: str) -> None:
    assert re.fullmatch(r"(line \d+ of a program)?", refusal_of(text))


@given(garbled(TEXT))
def test_a_text_is_a_program_that_prints_so_or_is_refused(text: str) -> None:
    """A line that is passed over, or read as another, would let a program mean what its text does not say."""
    try:
        program = Program.parse(text)
    except PlanError:
        return
    assert str(program).splitlines() == text.splitlines()


@given(st.text(max_size=60))
def test_any_text_raises_nothing_but_plan_errors(text: str) -> None:
    with pytest.raises(PlanError):
        Program.parse(text)


WRONG_LINES = [
    (1, "worker 0 of"),
    (1, "worker zero of 3"),
    (1, "worker 0 in 3"),
    (2, "loop"),
    (2, "loop every 0 over run"),
    (2, "loop every 1 over epoch"),
    (2, "loop each 1 over run"),
    (3, ""),
    (3, "tapes"),
    (4, "registers two"),
    (4, "registers 2 2"),
    (4, "registers 0"),
    (4, "register 2"),
    (5, "channel 0 forward 0.0>1.1 slots"),
    (5, "channel 0 forward 0.0>1.1 slots 2 3"),
    (5, "channel 0 forward 0>1 slots 2"),
    (5, "channel 0 sideways 0.0>1.1 slots 2"),
    (5, "channel 0 forward 0.0>1.1 places 2"),
    (5, "channel x forward 0.0>1.1 slots 2"),
    (8, "bodies"),
    (9, "  read"),
    (9, "  read g+2"),
    (9, "  write 0 g"),
    (9, "  read 0 g2"),
    (9, "  read 0 gx2"),
    (9, "  read 0 g--1"),
    (9, "  read 0 h"),
    (9, "   "),
    (9, "read 0 g"),
    (10, "  forward 0 g gives"),
    (10, "  forward 0 g gives 0;2"),
    (10, "  forward 0 g gives ,"),
    (10, "  forward 0 g gives 0 gives 2"),
    (10, "  forward 0 g hands 0"),
    (10, "  forward 0 g gives 0,2 distance some mode recompute"),
    (10, "  forward 0 g gives 0,2 distance crossed mode guess"),
    (11, "  backward 0 g takes 1 weights dead mode recompute"),
]


@pytest.mark.parametrize(("number", "line"), WRONG_LINES, ids=[line or "empty" for _, line in WRONG_LINES])
def test_a_line_that_no_program_has_is_refused_by_its_number(number: int, line: str) -> None:
    with pytest.raises(PlanError) as refusal:
        Program.parse("\n".join([*LINES[: number - 1], line, *LINES[number:]]) + "\n")
    assert (refusal.value.subject, refusal.value.got) == (f"line {number} of a program", repr(line))


@pytest.mark.parametrize("at", [0, 1, 7], ids=[LINES[at] for at in (0, 1, 7)])
def test_no_heading_can_be_left_out_or_stand_twice(at: int) -> None:
    for lines in ([*LINES[:at], *LINES[at + 1 :]], [*LINES[:at], LINES[at], *LINES[at:]]):
        with pytest.raises(PlanError, match="of a program"):
            Program.parse("\n".join(lines) + "\n")
