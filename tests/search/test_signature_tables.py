"""Sums of tables are minimised as by brute force and by an integer program, and boxings are priced as routes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from roundelay.errors import PlanError
from roundelay.ir.layout import Lay, canonical
from roundelay.ir.sbp import B, P, parse
from roundelay.lower.boxing import route
from roundelay.search.signatures.boxing_prices import BoxingPrices, Link
from roundelay.search.signatures.tables import LESS, Priced, Tables, solve
from tests.search.integer_program import least_s


def drawn(seed: int, most: int = 5) -> Tables:
    chance = np.random.default_rng(seed)
    sizes, variants = chance.integers(2, 5, chance.integers(2, most)).tolist(), int(chance.integers(1, 3))

    def priced(*shape: int) -> Priced:
        return Priced(chance.random(shape), np.round(10 * chance.random(shape)))

    own = tuple([priced(size, variants) for size in sizes])
    for one in own:
        one.seconds[1:][chance.random(one.seconds[1:].shape) < 0.2] = np.inf
    scopes = [scope for scope in itertools.combinations(range(len(sizes)), 2) if chance.random() < 0.7]
    return Tables(own, {(u, v): priced(sizes[u], sizes[v]) for u, v in scopes})


def all_choices(tables: Tables) -> list[tuple[float, float]]:
    """Seconds and bytes of every choice that is one."""
    every = itertools.product(*[list(np.ndindex(own.seconds.shape)) for own in tables.own])
    return [found for found in map(tables.totals, every) if math.isfinite(found[0])]


def limit_at(every: list[tuple[float, float]], share: float) -> float:
    return float(np.quantile([memory for _, memory in every], share))


@pytest.mark.parametrize("share", [1.0, 0.3, 0.05, 0.0])
def test_under_a_limit_on_memory_the_best_that_fits_is_found(share: float) -> None:
    for seed in range(40):
        tables = drawn(seed)
        every = all_choices(tables)
        limit = limit_at(every, share)
        found = solve(tables, None if share == 1 else limit)
        least = min(seconds for seconds, memory in every if memory <= limit)
        assert (found.seconds, found.bound_s) == (pytest.approx(least), pytest.approx(least)), seed
        assert found.memory <= limit


def test_no_choice_fits_and_the_smallest_fix_is_told() -> None:
    tables = drawn(3)
    smallest = min(memory for _, memory in all_choices(tables))
    with pytest.raises(PlanError, match=r"Smallest fix: 3 B more"):
        solve(tables, smallest - 3)


def test_a_search_that_is_cut_short_tells_a_bound() -> None:
    gaps = 0
    for seed in range(40):
        tables = drawn(seed)
        every = all_choices(tables)
        limit = limit_at(every, 0.1)
        found = solve(tables, limit, seconds=-1.0)
        least = min(seconds for seconds, memory in every if memory <= limit)
        assert LESS * found.bound_s <= least <= found.seconds / LESS
        gaps += found.bound_s < LESS * least
    assert gaps > 5


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_an_integer_program_agrees(share: float) -> None:
    pytest.importorskip("scipy.optimize")
    for seed in range(12):
        tables = drawn(seed, 6)
        limit = None if share == 1 else limit_at(all_choices(tables), share)
        assert solve(tables, limit).seconds == pytest.approx(least_s(tables, limit)), seed


@pytest.mark.parametrize("dims", ["S(0) S(1) B P", "S(0) S(1/3) B P"])
def test_boxings_are_priced_as_routes(dims: str) -> None:
    mesh = {"a": 2, "b": 4}
    every = itertools.product(map(parse, dims.split()), repeat=2)
    both = [pairs for own in every for pairs in itertools.permutations(zip(mesh, own, strict=True))]
    lays = list(dict.fromkeys(canonical(tuple([pair for pair in pairs if pair[1] != B])) for pairs in both))
    prices = BoxingPrices(lays, mesh, dict.fromkeys(mesh, Link(0.0, 1.0)), 24.0)
    found = prices.seconds(lays, lays)
    for (i, source), (j, target) in itertools.product(enumerate(lays), repeat=2):
        own = route(source, target, tuple(mesh.items()), 2)
        assert found[i, j] == pytest.approx(24 * float(own.share)), (source, target)
        assert bool(prices.way(source, target)) == bool(own.steps), (source, target)


def test_a_boxing_sends_least_along_the_slow_axis() -> None:
    mesh, links = {"a": 2, "b": 2}, {"a": Link(1.0, 1.0), "b": Link(1.0, 100.0)}
    source: Lay = (("a", P), ("b", P))
    prices = BoxingPrices([source, ()], mesh, links, 100.0)
    assert prices.seconds([source], [()])[0, 0] == pytest.approx(4 + 2 * 50 / 100 + 2 * 25)
    assert [step.axis for step in prices.way(source, ())] == ["b", "a", "b"]
