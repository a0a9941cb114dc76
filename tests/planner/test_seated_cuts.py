"""Cuts for unequal workers are exact: no other order of the holders over the stages, and no other cuts, are better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.planner import partition_dp
from roundelay.planner.cost_model import Cuts
from roundelay.planner.partition_dp import TIE, Holders, Seats, best_cuts
from tests.planner.test_partition_dp import Setting, chain, every_cut, settings

KINDS = st.builds(
    lambda count, speed, memory, node: Holders(((),) * count, speed, memory, (node,)),
    st.integers(1, 2),
    st.sampled_from([0.25, 0.5, 1.0, 3.0]),
    st.sampled_from([40.0, 90.0, math.inf]),
    st.sampled_from("ab"),
)
WITHIN, BETWEEN = (3.0, 400.0), (7.0, 30.0)


def held(stage: int, start: int, stop: int) -> int:
    """Bytes that grow with the operations of a stage, and are more in the first stages."""
    return (stop - start) * (12 - 3 * stage)


def every_order(seats: Seats, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All kinds over the stages, each as often as there are holders of it."""
    every = [i for i, kind in enumerate(seats.kinds) for _ in kind.groups]
    yield from {seats.order} if seats.order else set(itertools.permutations(every, num_stages))


def seconds(setting: Setting, seats: Seats, cuts: Cuts, order: tuple[int, ...]) -> float:
    """The slowest stage, by sums of its own: computation over the speed, and each neighbour's messages by its link."""
    prices, slowest = setting.prices, 0.0
    nodes = [seats.kinds[i].nodes for i in order]
    for k, (start, stop) in enumerate(itertools.pairwise(cuts)):
        own = prices.compute_s(start, stop) / seats.kinds[order[k]].speed
        for there, boundary in ((k - 1, start), (k + 1, stop)):
            if 0 <= there < len(order):
                latency_s, bytes_per_s = WITHIN if nodes[there] == nodes[k] else BETWEEN
                across = prices._across[boundary]
                back = across.first_back < stop if there < k else across.last_back >= start
                num_bytes = prices.bytes_in(start, stop) if there < k else prices.bytes_out(start, stop)
                own += latency_s * (1 + back) + num_bytes / prices.sample_micro_batches / bytes_per_s
        slowest = max(slowest, own)
    return slowest


def fits(seats: Seats, cuts: Cuts, order: tuple[int, ...]) -> bool:
    pairs = enumerate(zip(itertools.pairwise(cuts), order, strict=True))
    return seats.held is None or all(seats.held(k, *ends) <= seats.kinds[i].memory for k, (ends, i) in pairs)


@given(settings(), st.lists(KINDS, min_size=1, max_size=3), st.integers(1, 4), st.booleans(), st.data())
def test_no_order_and_no_cuts_are_better(
    setting: Setting, kinds: list[Holders], num_stages: int, fixed: bool, data: st.DataObject
) -> None:
    terms = replace(setting.terms, latency_s=WITHIN[0], bytes_per_s=WITHIN[1], between=BETWEEN)
    setting = replace(setting, terms=terms)
    seats = Seats(tuple(sorted(kinds, key=lambda own: -own.speed)), held=held)
    every = [i for i, kind in enumerate(seats.kinds) for _ in kind.groups]
    cuts = every_cut(setting, num_stages)
    if len(every) < num_stages or not cuts:
        return
    if fixed:
        seats = replace(seats, order=tuple(data.draw(st.permutations(every))[:num_stages]))
    pairs = [*itertools.product(cuts, every_order(seats, num_stages))]
    known = [pair for pair in pairs if fits(seats, *pair)] or pairs
    times = [seconds(setting, seats, *pair) for pair in known]
    chosen = best_cuts(setting.prices, num_stages, seats)
    assert chosen in known
    assert max(chosen[1].count(i) - len(kind.groups) for i, kind in enumerate(seats.kinds)) <= 0 or fixed
    limit = min(times) * (1 + TIE)
    assert seconds(setting, seats, *chosen) <= limit * (1 + 1e-9)

    def price(cuts: Cuts, order: tuple[int, ...]) -> tuple[int, int]:
        crossings = sum(seats.kinds[a].nodes != seats.kinds[b].nodes for a, b in itertools.pairwise(order))
        return crossings, sum(setting.prices.bytes_in(start, stop) for start, stop in itertools.pairwise(cuts))

    within = [pair for pair, time in zip(known, times, strict=True) if time <= limit * (1 - 1e-9)]
    assert price(*chosen) <= min([price(*pair) for pair in within], default=(99, 0))


def test_shares_are_as_large_as_the_speeds() -> None:
    setting = chain([1.0] * 12)
    seats = Seats((Holders(((),), 1.0), Holders(((),), 0.5)))
    cuts, order = best_cuts(setting.prices, 2, seats)
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    assert abs(dict(zip(order, sizes, strict=True))[0] - 8) <= 1, "two of three parts, of 12 operations and the loss"
    same = Seats((Holders(((),) * 3),))
    assert best_cuts(setting.prices, 3) == best_cuts(setting.prices, 3, same)


def test_a_slow_worker_is_left_out_where_a_fast_one_is_left() -> None:
    seats = Seats((Holders(((), ()), 1.0), Holders(((), ()), 0.1)))
    assert best_cuts(chain([1.0] * 8).prices, 2, seats)[1] == (0, 0)


def test_a_small_memory_makes_a_small_stage_and_none_that_is_too_small_keeps_it_from_being_told() -> None:
    setting = chain([1.0] * 8)
    small = Holders(((),), 1.0, 24.0)
    cuts, order = best_cuts(setting.prices, 2, Seats((small, Holders(((),), 1.0)), held=held))
    k = order.index(0)
    assert held(k, *cuts[k : k + 2]) <= 24.0 < held(k, 0, cuts[1] + 1)
    none = Seats((replace(small, groups=((), ())),), held=held)
    assert best_cuts(setting.prices, 2, none) == best_cuts(setting.prices, 2)


def test_of_too_many_orders_the_fastest_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_dp, "MOST_STATES", 3)
    seats = Seats((Holders(((), ()), 1.0), Holders(((),), 0.5)))
    assert best_cuts(chain([1.0] * 10).prices, 3, seats)[1] == (0, 0, 1)


def test_of_cuts_alike_those_cross_nodes_least() -> None:
    """Also where the fewest bytes are sent with a worker between two of another node."""
    sizes = [100] * 12
    sizes[2] = sizes[8] = 1
    seats = Seats((Holders(((),), 2.0, math.inf, ("b",)), Holders(((), ()), 1.0, math.inf, ("a",))))
    cuts, order = best_cuts(chain([1.0] * 12, sizes).prices, 3, seats)
    assert (order, cuts[1:-1]) in {((0, 1, 1), (6, 9)), ((1, 1, 0), (3, 6))}
