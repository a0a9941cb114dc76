"""The generator of the suite's cells: what it leaves out, no test sees."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.equivalence.cells import PAIRS as FACTORS
from tests.equivalence.pairwise import covering


@pytest.mark.parametrize(
    "factors",
    [
        {"a": "xyz", "b": (1, 2), "c": (True, False)},
        {"a": (1,), "b": (1,)},
        {letter: range(size) for letter, size in zip("abcdef", (2, 5, 3, 4, 2, 3), strict=True)},
        FACTORS,
    ],
)
def test_every_pair_of_values_meets(factors: dict[str, tuple[object, ...]]) -> None:
    rows = list(covering(factors))
    for a, b in combinations(factors, 2):
        assert {(row[a], row[b]) for row in rows} == {(x, y) for x in factors[a] for y in factors[b]}


def test_the_rows_are_few_and_always_the_same() -> None:
    rows = list(covering(FACTORS))
    assert rows == list(covering(FACTORS))
    assert len(rows) <= 1.05 * len(FACTORS["model"]) * len(FACTORS["variant"])  # no covering has fewer than the product
