"""The sample of the tests: what a break needs is in it, and every slow function but the longest."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sampling import SAMPLE, chosen, sample_of

ROOT = Path(__file__).resolve().parent.parent
LOG = """
0.50s call     tests/a.py::test_cheap[1]
0.90s setup    tests/a.py::test_cheap[2]
4.00s call     tests/a.py::test_many[1]
4.00s call     tests/a.py::test_many[2]
4.00s call     tests/a.py::test_many[3]
0.01s teardown tests/a.py::test_many[3]
9.00s call     tests/b.py::test_long
5.00s call     tests/b.py::test_alone
9 failed
"""


def test_many_are_thinned_out_and_the_longest_left_out() -> None:
    assert sample_of(LOG) == {"tests/a.py::test_many": 3, "tests/b.py::test_long": 0}


def test_one_of_so_many_is_kept_and_what_is_needed_as_well() -> None:
    ids = [f"f::many[{i}]" for i in range(5)] + ["f::long", "f::other"]
    sample = {"f::many": 2, "f::long": 0}
    assert chosen(ids, sample, ()) == [True, False, True, False, True, False, True]
    assert chosen(ids, sample, [("f::many[1]",), ("f",)]) == [True] * 7
    kept = chosen(ids, sample, [("f::many[1]",), ("f", "-k", "lo and ng")])
    assert kept == [True, True, True, False, True, True, True]


def test_what_is_thinned_out_exists() -> None:
    for function in json.loads(SAMPLE.read_text(encoding="utf-8")):
        file, _, name = function.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), function
