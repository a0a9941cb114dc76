"""Pairwise covering: few rows in which each value of each factor meets each value of every other one.

Most faults need two things to come together (Kuhn, Wallace and Gallo, *Software fault interactions and implications for
software testing*, IEEE TSE 2004), so that a suite which runs all pairs finds most of what the whole table would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = frozenset[tuple[str, int]]
Row = dict[str, int]


def pairs_of(row: Mapping[str, int]) -> set[Pair]:
    """Every pair of (factor, index of its value) in a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Every pair that some row must hold."""
    return {
        frozenset(((a, i), (b, j)))
        for a, b in combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }


def covering(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows that cover every pair; the same ones every time.

    Greedy: a row starts from an uncovered pair of the two largest factors (of all, once those are done), and takes for
    each other factor the value with most uncovered pairs, the least used one among equals.
    """
    missing = all_pairs(factors)
    used: Counter[tuple[str, int]] = Counter()
    by_size = sorted(factors, key=lambda name: -len(factors[name]))
    while missing:
        row: Row = dict(min(missing, key=lambda pair: sorted((by_size.index(f), i) for f, i in pair)))
        for name in by_size:
            if name not in row:
                row[name] = _best(name, len(factors[name]), row, missing, used)
        missing -= pairs_of(row)
        used.update(row.items())
        yield {name: factors[name][row[name]] for name in factors}


def _best(name: str, count: int, row: Row, missing: set[Pair], used: Counter[tuple[str, int]]) -> int:
    """The value of ``name`` that goes best with what the row has."""
    gains = [sum(frozenset(((name, i), other)) in missing for other in row.items()) for i in range(count)]
    return min(range(count), key=lambda i: (-gains[i], used[name, i], i))
