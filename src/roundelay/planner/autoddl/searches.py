"""AutoDDL's searches (Sect. 4.6): exhaustive, coordinate descent, Metropolis-Hastings, random.

A heuristic is an endless iterator over what it evaluates: a strategy's cost, and the strategy. So all are stopped
alike, after some number of evaluations. Each draws from the generator that it is given alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, product
from random import Random

from roundelay.planner.autoddl.prices import Prices, Strategy

Evaluated = tuple[float, Strategy]
"""Seconds of a strategy, and the strategy."""


def exhaustive(prices: Prices) -> Evaluated:
    """The cheapest of all strategies; of equally cheap ones the first.

    By dynamic programming, which is exact, as a layer's cost depends on its neighbours alone.
    """
    every = range(len(prices.triples))
    starts: list[Sequence[int]] = [[first] for first in every] if prices.is_ring else [every]
    strategy = min(_cheapest_from(prices, start) for start in starts)[1]
    return prices.cost(strategy), strategy


def _cheapest_from(prices: Prices, starts: Sequence[int]) -> Evaluated:
    best: list[Evaluated] = [(prices.alone[0][state], (state,)) for state in starts]
    for alone, between in zip(prices.alone[1:], prices.between[1:], strict=True):
        arrived: list[Evaluated] = []
        for state, seconds in enumerate(alone):
            cost, strategy = min((cost + between[strategy[-1]][state], strategy) for cost, strategy in best)
            arrived.append((cost + seconds, (*strategy, state)))
        best = arrived
    return min((cost + prices.between[0][strategy[-1]][strategy[0]], strategy) for cost, strategy in best)


def random_search(prices: Prices, random: Random) -> Iterator[Evaluated]:
    """Strategies drawn uniformly."""
    while True:
        strategy = _random_strategy(prices, random)
        yield prices.cost(strategy), strategy


def metropolis_hastings(prices: Prices, random: Random, beta: float) -> Iterator[Evaluated]:
    """Strategies S with probability P(S) ∝ exp(-beta cost(S)), one layer changed at a time.

    Args:
        prices: of all strategies.
        random: of the draws.
        beta: per second.
    """
    strategy = _random_strategy(prices, random)
    cost = prices.cost(strategy)
    yield cost, strategy
    while True:
        proposed = _changed(strategy, random.randrange(len(strategy)), random.randrange(len(prices.triples)))
        new = prices.cost(proposed)
        yield new, proposed
        if new <= cost or random.random() < math.exp(beta * (cost - new)):
            cost, strategy = new, proposed


def coordinate_descent(prices: Prices, random: Random) -> Iterator[Evaluated]:
    """Each layer in turn takes its cheapest triple, until none changes; then again from another random strategy."""
    while True:
        best: Evaluated = math.inf, _random_strategy(prices, random)
        settled = False
        while not settled:
            before = best
            for layer, state in product(range(len(prices.alone)), range(len(prices.triples))):
                strategy = _changed(best[1], layer, state)
                yield (evaluated := (prices.cost(strategy), strategy))
                best = min(best, evaluated)
            settled = best == before


def lowest_after(search: Iterator[Evaluated], evaluations: Sequence[int]) -> list[float]:
    """The lowest cost that a search has found after each of these numbers of evaluations, which increase."""
    lowest = list(accumulate((cost for cost, _ in islice(search, evaluations[-1])), min))
    return [lowest[number - 1] for number in evaluations]


def _random_strategy(prices: Prices, random: Random) -> Strategy:
    return tuple(random.randrange(len(prices.triples)) for _ in prices.alone)


def _changed(strategy: Strategy, layer: int, state: int) -> Strategy:
    return (*strategy[:layer], state, *strategy[layer + 1 :])
