"""AutoDDL's searches (Sect. 4.6): exhaustive, coordinate descent, Metropolis-Hastings, random.

A heuristic is an endless iterator over what it evaluates: a plan's cost, and the plan. So all are stopped alike, after
some number of evaluations. Each draws from the generator that it is given alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, product
from random import Random

from roundelay.planner.autoddl.prices import Plan, Prices

Evaluated = tuple[float, Plan]
"""Seconds of a plan, and the plan."""


def exhaustive(prices: Prices) -> Evaluated:
    """The cheapest of all plans; of equally cheap ones the first.

    By dynamic programming, which is exact, as a layer's cost depends on its neighbours alone.
    """
    every = range(len(prices.triples))
    starts: list[Sequence[int]] = [[first] for first in every] if prices.is_ring else [every]
    plan = min(_cheapest_from(prices, start) for start in starts)[1]
    return prices.cost(plan), plan


def _cheapest_from(prices: Prices, starts: Sequence[int]) -> Evaluated:
    best: list[Evaluated] = [(prices.alone[0][state], (state,)) for state in starts]
    for alone, between in zip(prices.alone[1:], prices.between[1:], strict=True):
        arrived: list[Evaluated] = []
        for state, seconds in enumerate(alone):
            cost, plan = min((cost + between[plan[-1]][state], plan) for cost, plan in best)
            arrived.append((cost + seconds, (*plan, state)))
        best = arrived
    return min((cost + prices.between[0][plan[-1]][plan[0]], plan) for cost, plan in best)


def random_search(prices: Prices, random: Random) -> Iterator[Evaluated]:
    """Plans drawn uniformly."""
    while True:
        plan = _random_plan(prices, random)
        yield prices.cost(plan), plan


def metropolis_hastings(prices: Prices, random: Random, beta: float) -> Iterator[Evaluated]:
    """Plans S with probability P(S) ∝ exp(-beta cost(S)); each differs from the one it is proposed from in one layer.

    Args:
        prices: of all plans.
        random: of the draws.
        beta: per second.
    """
    plan = _random_plan(prices, random)
    cost = prices.cost(plan)
    yield cost, plan
    while True:
        proposed = _changed(plan, random.randrange(len(plan)), random.randrange(len(prices.triples)))
        new = prices.cost(proposed)
        yield new, proposed
        if new <= cost or random.random() < math.exp(beta * (cost - new)):
            cost, plan = new, proposed


def coordinate_descent(prices: Prices, random: Random) -> Iterator[Evaluated]:
    """Each layer in turn takes its cheapest triple, until none changes; then all begins again from a random plan."""
    while True:
        best: Evaluated = math.inf, _random_plan(prices, random)
        settled = False
        while not settled:
            before = best
            for layer, state in product(range(len(prices.alone)), range(len(prices.triples))):
                plan = _changed(best[1], layer, state)
                yield (evaluated := (prices.cost(plan), plan))
                best = min(best, evaluated)
            settled = best == before


def lowest_after(search: Iterator[Evaluated], evaluations: Sequence[int]) -> list[float]:
    """The lowest cost that a search has found after each of these numbers of evaluations, which increase."""
    lowest = list(accumulate((cost for cost, _ in islice(search, evaluations[-1])), min))
    return [lowest[number - 1] for number in evaluations]


def _random_plan(prices: Prices, random: Random) -> Plan:
    return tuple(random.randrange(len(prices.triples)) for _ in prices.alone)


def _changed(plan: Plan, layer: int, state: int) -> Plan:
    return (*plan[:layer], state, *plan[layer + 1 :])
