"""The sample of the tests: no function takes long, and none is left out for ever."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests import sampling
from tests.sampling import CAP_S, SAMPLE, chosen, sample_of, turn_of_commit

ROOT = Path(__file__).resolve().parent.parent
LONG = "tests/b.py::test_long"


def log(many: float, long: float) -> str:
    """What pytest prints of three cases and one long test."""
    cases = "".join(f"{many / 3:.2f}s call     tests/a.py::test_many[{case}]\n" for case in range(3))
    return f"0.01s setup    tests/a.py::test_cheap\n{cases}{long:.2f}s call     {LONG}\n9 failed\n"


def test_a_function_is_thinned_out_as_far_as_it_is_slow() -> None:
    assert sample_of(log(1.9 * CAP_S, 29.9 * CAP_S)) == {"tests/a.py::test_many": 2, LONG: 30}


def test_of_some_functions_every_commit_runs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ALWAYS", {LONG, "tests/a.py::test_many"})
    assert sample_of(log(29.9 * CAP_S, 29.9 * CAP_S)) == {"tests/a.py::test_many": 3}


def test_every_test_has_its_turn_and_each_commit_runs_others() -> None:
    ids = [f"f::many[{i}]" for i in range(5)] + ["f::long", "f::other"]
    sample = {"f::many": 2, "f::long": 30}
    turns = [chosen(ids, sample, turn) for turn in range(30)]
    assert Counter(name for turn in turns for name, kept in zip(ids, turn, strict=True) if kept) == {
        **{f"f::many[{i}]": 15 for i in range(5)},
        "f::long": 1,
        "f::other": 30,
    }
    assert turns[0][:5] == turns[2][:5] == [not kept for kept in turns[1][:5]]


def test_the_commit_has_a_number() -> None:
    assert (turn_of_commit() > 0) == (ROOT / ".git").exists()


def test_what_is_thinned_out_exists() -> None:
    for function in json.loads(SAMPLE.read_text(encoding="utf-8")):
        file, _, name = function.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), function
