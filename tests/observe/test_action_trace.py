"""Traces of letters: what is written is read, whatever else is an error that names a line."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import UsageError
from roundelay.observe.action_trace import ActionTrace, TraceHead, end_line, lines_of, parse

HEX = "0123456789abcdef"
DIGEST = st.text(HEX, min_size=16, max_size=16)
COUNT = st.integers(0, 10**18 - 1)
HEADS = st.builds(
    TraceHead,
    stage=st.integers(0, 99),
    stages=st.integers(1, 99),
    plan=DIGEST,
    model=st.text(HEX, min_size=1, max_size=64),
    seed=st.integers(-(2**63), 2**63 - 1),
    arithmetic=DIGEST,
    first=st.tuples(COUNT, COUNT),
)


@st.composite
def reports(draw: st.DrawFn) -> list[tuple[str, dict[int, str]]]:
    """What a stage reports: letters, and digests after some of them."""
    parts, before = [], 0
    for letters in draw(st.lists(st.text("FB", max_size=9), max_size=5)):
        places = draw(st.sets(st.integers(before, before + len(letters)))) if letters else set()
        parts.append((letters, {count: draw(DIGEST) for count in sorted(places)}))
        before += len(letters)
    return parts


def text_of(head: TraceHead, parts: list[tuple[str, dict[int, str]]], *, ended: bool) -> str:
    """The file that they make."""
    text, before = str(head), 0
    for letters, digests in parts:
        text += lines_of(letters, digests, before)
        before += len(letters)
    return text + (end_line(before) if ended else "")


@given(HEADS, reports(), st.booleans())
def test_what_is_written_is_read(head: TraceHead, parts: list[tuple[str, dict[int, str]]], ended: bool) -> None:
    digests = {count: found for _, own in parts for count, found in own.items()}
    expected = ActionTrace(head, "".join(letters for letters, _ in parts), digests, ended)
    assert parse(text_of(head, parts, ended=ended), "t") == expected


@given(HEADS, reports(), st.booleans(), st.data())
def test_any_other_text_is_a_trace_or_an_error_that_names_a_line(
    head: TraceHead, parts: list[tuple[str, dict[int, str]]], ended: bool, data: st.DataObject
) -> None:
    text = text_of(head, parts, ended=ended)
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 20)))
    put = data.draw(st.one_of(st.text(max_size=5), st.text("FB= end\n\r\v0123456789", max_size=9)))
    try:
        found = parse(text[:at] + put + text[until:], "name")
    except UsageError as error:
        number = re.match(r"line (\d+) of name", str(error))
        assert number is not None
        assert 1 <= int(number[1]) <= text.count("\n") + put.count("\n") + 2
    else:
        assert set(found.letters) <= {"F", "B"}
        assert all(count <= len(found.letters) for count in found.digests)


HEAD = TraceHead(stage=1, stages=3, plan="0" * 16, model="m", seed=-7, arithmetic="f" * 16, first=(12, 4))
TEXT = f"""\
roundelay action trace 1
stage 1 of 3
plan 0000000000000000
model m
seed -7
arithmetic ffffffffffffffff
from 12 4

FFB
= 3 {"a" * 16}
FB
end 5
"""


def test_a_file_as_it_is_documented() -> None:
    found = parse(TEXT, "t")
    assert found == ActionTrace(HEAD, "FFBFB", {3: "a" * 16}, ended=True)
    assert str(HEAD) + lines_of("FFBFB", {3: "a" * 16}, 0) + end_line(5) == TEXT
    assert lines_of("BF", {3: "a" * 16}, 3) == f"= 3 {'a' * 16}\nBF\n"


@pytest.mark.parametrize("cut", [1, 2, 4, 7, 30])
def test_a_last_line_without_its_end_is_dropped(cut: int) -> None:
    found = parse(TEXT[:-cut], "t")
    assert not found.ended
    whole = TEXT[:-cut].rpartition("\n")[0]
    assert (found.letters, found.digests) == ("FFBFB"[: 3 if cut == 30 else 5 if cut < 7 else 3], found.digests)
    assert found.digests == ({3: "a" * 16} if "= 3" in whole else {})


@pytest.mark.parametrize(
    ("old", "new", "number"),
    [
        ("trace 1", "trace 2", 1),
        ("stage 1 of 3", "stage 1", 2),
        ("plan 0", "plan g", 3),
        ("seed -7\n", "", 5),
        ("from 12 4\n", "from 12 4\nmore\n", 8),
        ("from 12 4\n\n", "from 12 4\n", 8),
        ("FFB", "FGB", 9),
        ("FFB", "FFFB", 10),
        ("= 3", "= 4", 10),
        ("FB\nend", "F B\nend", 11),
        ("end 5", "end 4", 12),
        ("end 5\n", "end 5\nF\n", 13),
        ("end 5\n", "end 5\nend 5\n", 13),
        ("end 5\n", f"end 5\n= 5 {'b' * 16}\n", 13),
    ],
)
def test_a_line_that_no_trace_has_there_is_named(old: str, new: str, number: int) -> None:
    assert TEXT.count(old) == 1 or old == "FFB"
    with pytest.raises(UsageError, match=rf"^line {number} of name\b"):
        parse(TEXT.replace(old, new, 1), "name")
