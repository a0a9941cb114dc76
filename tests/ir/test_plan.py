"""The plan's text: read as written, and refused when anything is missing, twice, unknown or of a wrong kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.clip import Clip
from roundelay.ir.exchange import ExchangePlan, Phase
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import FORMAT, EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.sbp import P_MAX, B, P, Split
from tests.ir.garbled import garbled
from tests.lower.plans import FEW, RULES, plan_of, plans, replicated

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
FLOATS = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)
INTS = st.integers(0, 2**63)
CLIPS = st.just(Clip()) | st.builds(
    Clip,
    st.sampled_from(["stage", "previous", "global"]),
    st.floats(min_value=0.0, exclude_min=True, allow_nan=False, allow_infinity=False),
)
POWERS = st.integers(0, 40).map(lambda exponent: 2.0**exponent)
SCALES = st.just(LossScale()) | st.builds(LossScale, POWERS, st.integers(0, 10**13 - 1))
SPLITS = st.builds(Split, st.integers(0, 9), st.integers(1, 9), st.integers(1, 9))
LAYS = st.lists(st.tuples(TEXTS, SPLITS | st.sampled_from([B, P, P_MAX])), max_size=2).map(tuple)
DIMS = st.integers(0, 9)
PHASES = (
    st.builds(Phase, DIMS, st.none(), st.sampled_from(["sum", "max"]))
    | st.builds(Phase, st.none(), DIMS)
    | st.builds(Phase, DIMS, DIMS)
)
WORKERS = st.builds(WorkerPlan, name=TEXTS, device=TEXTS, threads=INTS, speed=FLOATS)
STAGES = st.builds(
    StagePlan,
    workers=st.lists(TEXTS, max_size=2).map(tuple),
    segments=st.lists(TEXTS, max_size=3).map(tuple),
    forward_s=FLOATS,
    backward_s=FLOATS,
    weights_s=FLOATS,
    update_s=FLOATS,
    parameter_bytes=INTS,
    tape_bytes=INTS,
    owed_bytes=INTS,
    in_flight=INTS,
)
EDGES = st.builds(
    EdgePlan,
    source=INTS,
    target=INTS,
    slots=INTS,
    forward_bytes=INTS,
    backward_bytes=INTS,
    gradient=st.booleans(),
    latency_s=FLOATS,
    bytes_per_s=FLOATS,
)
EXCHANGES = st.builds(
    ExchangePlan,
    stage=INTS,
    kind=TEXTS,
    phases=st.lists(PHASES, max_size=2).map(tuple),
    dtypes=st.lists(TEXTS, max_size=2).map(tuple),
    axis=TEXTS,
    value=TEXTS,
    segment=INTS,
    shapes=st.lists(st.lists(INTS, max_size=2).map(tuple), max_size=2).map(tuple),
    unused=st.lists(TEXTS, max_size=2).map(tuple),
    seconds=FLOATS,
    busy_s=FLOATS,
)
PLANS = st.builds(
    Plan,
    format=st.just(FORMAT),
    model=TEXTS,
    rule=TEXTS,
    layout=TEXTS,
    predictor=TEXTS,
    backward=TEXTS,
    recompute=st.lists(TEXTS, max_size=3).map(tuple),
    clip=CLIPS,
    loss_scale=SCALES,
    ema=FLOATS,
    replicas=INTS,
    shards=INTS,
    mesh=st.dictionaries(TEXTS, INTS, max_size=2),
    parameters=st.dictionaries(TEXTS, LAYS, max_size=2),
    states=st.dictionaries(TEXTS, LAYS, max_size=2),
    outputs=st.dictionaries(TEXTS, LAYS, max_size=2),
    micro_batches=INTS,
    transport=TEXTS,
    deadline_s=FLOATS,
    latency_s=FLOATS,
    bytes_per_s=FLOATS,
    instruction_s=FLOATS,
    read_s=FLOATS,
    input_bytes=INTS,
    workers=st.lists(WORKERS, min_size=1, max_size=2).map(tuple),
    stages=st.lists(STAGES, min_size=1, max_size=3).map(tuple),
    edges=st.lists(EDGES, max_size=3).map(tuple),
    exchanges=st.lists(EXCHANGES, max_size=2).map(tuple),
)
SMALL = plan_of("pipeoptim", 3, 2)
LINES = SMALL.text().splitlines()
FULL_LINES = [i for i, line in enumerate(LINES) if line]


@FEW
@given(PLANS)
def test_a_plan_is_read_as_it_is_printed(plan: Plan) -> None:
    assert Plan.parse(plan.text()) == plan


@FEW
@given(plans())
def test_the_text_of_a_plan_read_is_the_text_that_was_read(plan: Plan) -> None:
    text = plan.text()
    assert Plan.parse(text).text() == text


def is_kept(text: str) -> bool:
    """Whether a plan with this text in its names is read as it was printed."""
    plan = replace(SMALL, model=text, stages=(replace(SMALL.stages[0], segments=(text, "\\" + text)),))
    try:
        return Plan.parse(plan.text()) == plan
    except PlanError:
        return False


def test_any_character_may_stand_in_a_name() -> None:
    odd = [chr(c) for c in (*range(256), 0x2028, 0xFFFD, 0x1F600)]
    assert [char for char in odd if not is_kept(f"a{char}b")] == []


@pytest.mark.parametrize("number", [0.0, 5e-324, 1e-5, 0.1, 1.0, 2**53 + 2.0, 1e16, 1e22, 1.7976931348623157e308])
def test_a_float_keeps_every_bit(number: float) -> None:
    text = replace(SMALL, latency_s=number).text()
    assert Plan.parse(text).latency_s.hex() == number.hex()


def test_a_whole_number_of_seconds_may_be_written_without_a_point() -> None:
    plan = Plan.parse(SMALL.text().replace("deadline_s = 60.0", "deadline_s = 60"))
    assert plan == SMALL
    assert type(plan.deadline_s) is float


COMMENTS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], include_characters="\n\t")), max_size=4
)


@FEW
@given(COMMENTS)
def test_comments_are_not_read(comments: list[str]) -> None:
    assert Plan.parse(SMALL.text(comments)) == SMALL


def test_comments_stand_on_top_one_to_a_line() -> None:
    assert SMALL.text(["made by hand", "", "forward 1 s"]).startswith(
        f"# made by hand\n#\n# forward 1 s\nformat = {FORMAT}\n"
    )


@pytest.mark.parametrize("at", FULL_LINES, ids=[LINES[i] for i in FULL_LINES])
def test_no_line_of_a_plan_can_be_left_out(at: int) -> None:
    with pytest.raises(PlanError):
        Plan.parse("\n".join([*LINES[:at], *LINES[at + 1 :]]))


@pytest.mark.parametrize("at", FULL_LINES, ids=[LINES[i] for i in FULL_LINES])
def test_no_line_of_a_plan_can_stand_twice(at: int) -> None:
    with pytest.raises(PlanError):
        Plan.parse("\n".join([*LINES[:at], LINES[at], *LINES[at:]]))


@given(st.sampled_from(RULES).flatmap(lambda rule: garbled(plan_of(rule, 2, 2).text())))
def test_a_garbled_plan_is_read_as_something_that_prints_or_is_refused(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except PlanError:
        return
    assert Plan.parse(plan.text()) == plan


@given(st.text(max_size=60))
def test_any_text_is_a_plan_or_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("model", "3"),
        ("model", "['a']"),
        ("micro_batches", "-1"),
        ("micro_batches", "2.0"),
        ("micro_batches", "true"),
        ("micro_batches", "'2'"),
        ("micro_batches", "1979-05-27"),
        ("deadline_s", "nan"),
        ("deadline_s", "inf"),
        ("deadline_s", "-0.1"),
        ("deadline_s", "true"),
        ("deadline_s", "'60'"),
        ("deadline_s", "1" + "0" * 400),
        ("stages", "[]"),
        ("stages", "[1]"),
        ("stages", "{}"),
        ("edges", "3"),
        ("edges", "[[]]"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_its_field(field: str, wrong: str) -> None:
    top = [line for line in LINES[: LINES.index("")] if not line.startswith(f"{field} = ")]
    start, end = LINES.index(""), len(LINES)
    if field in ("stages", "edges"):
        end = LINES.index(f"[[{field}]]")
    parts = "\n".join(LINES[start:end])
    with pytest.raises(PlanError) as refusal:
        Plan.parse("\n".join([*top, f"{field} = {wrong}", parts]))
    assert field in str(refusal.value) or field == "edges"


STAGE_WRONG = [
    ("gradient", "1"),
    ("gradient", "'true'"),
    ("segments", "'a'"),
    ("segments", "[1]"),
    ("tape_bytes", "1.5"),
]


@pytest.mark.parametrize(("field", "wrong"), STAGE_WRONG)
def test_a_wrong_value_in_a_stage_or_edge_is_refused_with_its_place(field: str, wrong: str) -> None:
    at = max(i for i, line in enumerate(LINES) if line.startswith(f"{field} = "))
    place = "edges[1]" if field == "gradient" else "stages[2]"
    with pytest.raises(PlanError) as refusal:
        Plan.parse("\n".join([*LINES[:at], f"{field} = {wrong}", *LINES[at + 1 :]]))
    assert refusal.value.subject == f"{place}: field {field!r}"


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_a_plan_of_an_earlier_format_is_refused_with_the_remedy(version: int) -> None:
    old = SMALL.text().replace(f"format = {FORMAT}", f"format = {version}")
    with pytest.raises(PlanError, match=r"which layout they have.*roundelay plan JOB\.py"):
        Plan.parse(old)


def test_a_plan_of_an_earlier_format_means_what_it_meant() -> None:
    lines = SMALL.text().splitlines()
    added = {
        12: "in_flight = ",
        11: "speed = ",
        10: "instruction_s = ",
        9: "shards = ",
        8: "sharded = ",
        7: "threads = ",
        6: "deterministic = ",
    }
    for version, field in added.items():
        lines = [line for line in lines if not line.startswith(field)]
        for of_edges in ("latency_s = ", "bytes_per_s = ") if version == 11 else ():
            first = next(i for i, line in enumerate(lines) if line.startswith(of_edges))  # the plan's
            lines = [line for i, line in enumerate(lines) if i == first or not line.startswith(of_edges)]
        old = "\n".join(lines).replace(f"format = {FORMAT}", f"format = {version}")
        assert Plan.parse(old) == SMALL
        with pytest.raises(PlanError, match="format of the plan"):
            Plan.parse(SMALL.text().replace(f"format = {FORMAT}", f"format = {version}"))


def test_a_stage_on_no_worker_of_the_plan_is_refused_by_its_number() -> None:
    for wrong in ('["w9"]', "[]"):
        plan = Plan.parse(SMALL.text().replace('workers = ["w1"]', f"workers = {wrong}"))
        with pytest.raises(PlanError, match=r"stages\[1\].workers of the plan.*w0, w1, w2"):
            plan.worker_of(1)


def test_placement_is_read_from_the_plan() -> None:
    swapped = (
        SMALL.text().replace('workers = ["w0"]', 'workers = ["?"]').replace('workers = ["w2"]', 'workers = ["w0"]')
    )
    plan = Plan.parse(swapped.replace('workers = ["?"]', 'workers = ["w2"]'))
    assert (tuple(map(plan.worker_of, range(plan.num_stages))), plan.worker_stages) == ((2, 1, 0), ((2,), (1,), (0,)))


def test_an_unknown_field_is_refused_by_its_name() -> None:
    with pytest.raises(PlanError) as refusal:
        Plan.parse("colour = 3\n" + SMALL.text())
    assert (refusal.value.subject, refusal.value.got) == ("the plan: field 'colour'", "an unknown field")


@pytest.mark.parametrize("version", ["0", "14", "'9'", "9.5", "9.0", "7.0", "true"])
def test_a_plan_of_another_format_is_refused_before_its_fields_are_read(version: str) -> None:
    with pytest.raises(PlanError) as refusal:
        Plan.parse(f"format = {version}\ncolour = 3\n")
    assert refusal.value.subject == "format of the plan"


def test_broken_toml_is_refused_with_its_line() -> None:
    with pytest.raises(PlanError, match="line 3"):
        Plan.parse(SMALL.text().replace('rule = "', "rule = ", 1))


@pytest.mark.parametrize("text", ["format = " + "1" * 5000, "format = " + "[" * 5000], ids=["digits", "brackets"])
def test_what_the_toml_reader_chokes_on_is_refused_too(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.parse(text)


def test_a_plan_without_edges_is_a_plan_of_one_stage() -> None:
    alone: Any = plan_of("1f1b", 1, 4)
    assert "[[edges]]" not in alone.text()
    assert Plan.parse(alone.text()).num_stages == 1


def test_texts_are_parsed_when_a_plan_is_made_in_python_too() -> None:
    made = replace(SMALL, clip="global:0.5", loss_scale="dynamic:4", parameters={"*": (("tensor", "S(0)"),)})  # type: ignore[arg-type,dict-item]
    assert (made.clip, made.loss_scale) == (Clip("global", 0.5), LossScale(4.0, 2000))
    assert made.parameters == {"*": (("tensor", Split(0)),)}
    assert Plan.parse(made.text()) == made
    with pytest.raises(PlanError, match="clip of the plan: got 'global'"):
        replace(SMALL, clip="global")  # type: ignore[arg-type]


def test_a_phase_that_means_nothing_is_told_when_the_plan_is_read() -> None:
    text = replicated(plan_of("1f1b", 2, 2), 2).text()
    with pytest.raises(PlanError, match="a phase of an exchange: got 'ring'"):
        Plan.parse(text.replace("reduce-scatter(0)", "ring", 1))


@pytest.mark.parametrize(
    ("line", "wrong", "told"),
    [
        ('clip = "none"', 'clip = "stage"', "clip of the plan: got 'stage'"),
        ('clip = "none"', "clip = 1", "the plan: field 'clip': got 1; expected str"),
        ('loss_scale = "none"', 'loss_scale = "3"', "loss_scale of the plan: got '3'"),
        ("states = {}", 'states = { w = [["replicas", "T"]] }', "a signature: got 'T'"),
        ("states = {}", 'states = { w = "S(0)" }', "the plan: field 'states': got {'w': 'S(0)'}; expected array"),
    ],
)
def test_a_text_that_means_nothing_is_told_when_the_plan_is_read(line: str, wrong: str, told: str) -> None:
    text = SMALL.text()
    assert line in text
    with pytest.raises(PlanError) as refusal:
        Plan.parse(text.replace(line, wrong))
    assert str(refusal.value).startswith(told)
