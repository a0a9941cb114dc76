"""Sums of tables as an integer program, which HiGHS solves (Huangfu and Hall, 2018), to compare the search with.

A binary for each variable's value and variant, and a share for each pair of values of two variables that have a table:
a value is taken as often as it stands in pairs, on both sides.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from roundelay.search.signatures.tables import Tables

Array = np.ndarray[Any, np.dtype[Any]]


def least_s(tables: Tables, limit: float | None = None, seconds: float = 600.0) -> float | None:
    """The fewest seconds of choices that need at most so many bytes; None if the program was not solved in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    every = [*tables.own, *tables.pairs.values()]
    costs, memory = (np.concatenate([getattr(one, name).ravel() for one in every]) for name in ("seconds", "memory"))
    finite, own = np.isfinite(costs), sum(one.seconds.size for one in tables.own)
    unit = costs[finite].max()  # HiGHS's tolerances are absolute
    matrix, right = _linked(tables)
    constraints = [LinearConstraint(matrix, right, right)]
    constraints += [LinearConstraint(memory[None], -np.inf, limit)] if limit is not None else []
    found = milp(
        np.where(finite, costs, 0.0) / unit,
        constraints=constraints,
        bounds=Bounds(0, finite.astype(float)),
        integrality=np.arange(len(costs)) < own,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    return unit * float(found.fun) if found.status == 0 else None


def _linked(tables: Tables) -> tuple[Any, Array]:
    """Rows of ones and minus ones, and their sums: each variable has a value, that of each pair in which it stands."""
    from scipy.sparse import csr_array

    shapes = [one.seconds.shape for one in (*tables.own, *tables.pairs.values())]
    starts = np.cumsum([0, *[n * m for n, m in shapes]]).tolist()
    places = [np.arange(a, b).reshape(own) for (a, b), own in zip(itertools.pairwise(starts), shapes, strict=True)]
    values, pairs = places[: len(tables.own)], places[len(tables.own) :]
    rows = [(own.ravel(), own.ravel()[:0]) for own in values]
    for (u, v), own in zip(tables.pairs, pairs, strict=True):
        rows += [*zip(own, values[u], strict=True), *zip(own.T, values[v], strict=True)]
    columns = np.concatenate([np.concatenate(row) for row in rows])
    signs = np.concatenate([np.repeat([1.0, -1.0], [len(more), len(less)]) for more, less in rows])
    ends = np.cumsum([0, *[len(more) + len(less) for more, less in rows]])
    right = np.concatenate([np.ones(len(values)), np.zeros(len(rows) - len(values))])
    return csr_array((signs, columns, ends), shape=(len(rows), starts[-1])), right
