"""What AutoDDL states of its space, costs, searches and figures; golden numbers of a search written apart from ours."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise, product
from random import Random

import pytest

from roundelay.comparison.autoddl_figures import figure_3, figure_4, figure_7, figure_8, figure_9
from roundelay.errors import UsageError
from roundelay.planner.autoddl.baselines import megatron, meshes, summa
from roundelay.planner.autoddl.boxing import CHEAPEST, PAPER, Boxing, boxing_s
from roundelay.planner.autoddl.collectives import Level, Machine, all_reduce, counting, halving, ring
from roundelay.planner.autoddl.models import FIGURE_8_WIDTHS, mlp, transformer, vgg13
from roundelay.planner.autoddl.prices import Prices, price
from roundelay.planner.autoddl.searches import (
    Evaluated,
    coordinate_descent,
    exhaustive,
    lowest_after,
    metropolis_hastings,
    random_search,
)
from roundelay.planner.autoddl.space import Chain, Linear, Triple, data_parallel, triples

GI = 2**30
TWO_LEVELS = (Level(2, 1e-5, 1e9), Level(4, 1e-6, 1e11))


def flat(devices: int) -> Machine:
    return (Level(devices, 5e-6, 1e10),)


def one(p0: int, p1: int, p2: int) -> Triple:
    return Triple((p0,), (p1,), (p2,))


def found(prices: Prices) -> tuple[float, str]:
    cost, strategy = exhaustive(prices)
    return cost, " ".join(map(str, prices.triples_of(strategy)))


def test_collectives_cost_what_table_2_says() -> None:
    assert ring(flat(8), (8,), 8e4) == pytest.approx(7 * 5e-6 + 7 / 8 * 8e-6)
    assert all_reduce(flat(8), (8,), 8e4) == pytest.approx(2 * (7 * 5e-6 + 7 / 8 * 8e-6))
    assert ring(flat(8), (1,), 8e4) == 0


def test_a_group_within_nodes_has_their_link_and_any_other_the_link_between() -> None:
    assert ring(TWO_LEVELS, (1, 4), 4e6) == pytest.approx(3e-6 + 3e6 / 1e11)
    assert ring(TWO_LEVELS, (2, 1), 4e6) == pytest.approx(1e-5 + 2e6 / 1e9)
    assert ring(TWO_LEVELS, (2, 4), 8e6) == pytest.approx(7e-5 + 7e6 / 1e9)


def test_by_halves_only_what_is_left_goes_between_nodes() -> None:
    assert halving(TWO_LEVELS, (2, 4), 8e6) == pytest.approx(2e-6 + 6e6 / 1e11 + 1e-5 + 1e6 / 1e9)


@pytest.mark.parametrize(("sizes", "number"), [((128,), 36), ((4096,), 91), ((2, 16), 45), ((1,), 1)])
def test_triples_of_a_layer(sizes: tuple[int, ...], number: int) -> None:
    machine = counting(*sizes)
    every = triples(machine)
    assert len(set(every)) == len(every) == number
    assert all(tuple(map(math.prod, zip(*triple, strict=True))) == sizes for triple in every)


def test_memory_limits_the_copies_of_a_weight() -> None:
    limited = triples(counting(2, 16), most_p0=4)
    assert limited == tuple(triple for triple in triples(counting(2, 16)) if math.prod(triple.p0) <= 4)
    costs = [found(price(transformer(64, 2**12), flat(16), most_p0=most))[0] for most in (1, 2, 4, 8, 16)]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 1


def test_levels_that_are_no_powers_of_two_are_refused() -> None:
    with pytest.raises(UsageError, match=r"got \[2, 6\]; expected powers of two"):
        triples(counting(2, 6))


@pytest.mark.parametrize(
    ("source", "target", "num_bytes"),
    [
        (one(2, 2, 4), one(2, 4, 2), 48 + 48),  # 256/(2 2) 3/4, and 256/(2 2) 3/4
        (one(2, 8, 1), one(4, 1, 4), 8),  # an all-to-all of two: 256/16 1/2
        (one(2, 4, 2), one(1, 8, 2), 16 + 8 + 112),
        (one(1, 4, 4), one(4, 1, 4), 48),  # p1 = p2': rows are scattered, nothing is left to do
        (one(1, 4, 4), one(2, 2, 4), 48 + 16),
    ],
)
def test_a_boxing_scatters_exchanges_and_gathers(source: Triple, target: Triple, num_bytes: int) -> None:
    assert boxing_s(PAPER, counting(16), source, target, (256, 256)) == num_bytes


def test_what_attention_makes_of_three_parts_is_gathered_as_one() -> None:
    assert boxing_s(PAPER, counting(16), one(2, 2, 4), one(2, 4, 2), (768, 256)) == 3 * 48 + 48


@pytest.mark.parametrize("machine", [counting(32), flat(32), TWO_LEVELS])
def test_the_cheapest_path_costs_no_more_than_the_paper_s(machine: Machine) -> None:
    pairs = list(product(triples(machine), repeat=2))
    costs = [[boxing_s(boxing, machine, *pair, (3e6, 1e6)) for pair in pairs] for boxing in (CHEAPEST, PAPER)]
    assert all(a <= b * (1 + 1e-12) for a, b in zip(*costs, strict=True))
    assert any(a < 0.9 * b for a, b in zip(*costs, strict=True))


def chains() -> Iterator[tuple[Chain, Machine]]:
    """Chains of every kind, with sizes at random, on machines of one and two levels."""
    random = Random(0)
    for before, machine in product(("free", "rows", "last"), (flat(8), counting(8), TWO_LEVELS)):
        widths = [2 ** random.randrange(4, 12) for _ in range(4)]
        layers = [Linear("", *random.choices(widths, k=2)) for _ in range(2 if machine is TWO_LEVELS else 3)]
        yield Chain(layers, 2 ** random.randrange(4, 12), before, replicated=1000), machine


@pytest.mark.parametrize("boxing", [PAPER, CHEAPEST])
def test_the_dynamic_programme_finds_what_trying_all_strategies_finds(boxing: Boxing) -> None:
    for chain, machine in chains():
        prices = price(chain, machine, boxing)
        strategies = list(product(range(len(prices.triples)), repeat=len(chain.layers)))
        assert len(strategies) == prices.num_strategies
        cost, strategy = exhaustive(prices)
        assert cost == prices.cost(strategy) == pytest.approx(min(map(prices.cost, strategies)), rel=1e-12)


@pytest.mark.parametrize("boxing", [PAPER, CHEAPEST])
def test_a_strategy_costs_the_sum_of_its_collectives(boxing: Boxing) -> None:
    """Counted again, one after the other."""
    for chain, machine in chains():
        prices, random = price(chain, machine, boxing), Random(1)
        strategy = tuple(random.randrange(len(prices.triples)) for _ in chain.layers)
        chosen, unit = prices.triples_of(strategy), 4 * chain.rows
        expected = 0.0
        before, written = {
            "last": (chosen[-1], chain.layers[-1].outputs),
            "rows": (data_parallel(machine), chain.layers[0].inputs),
            "free": (None, 0),
        }[chain.before]
        for layer, triple in zip(chain.layers, chosen, strict=True):
            if before:
                expected += 2 * boxing_s(boxing, machine, before, triple, (unit * written, unit * layer.inputs))
            weight = 4 * layer.inputs * layer.outputs / math.prod(triple.p1) / math.prod(triple.p2)
            expected += all_reduce(machine, triple.p0, weight)
            before, written = triple, layer.outputs
        if chain.before == "rows":
            expected += all_reduce(machine, data_parallel(machine).p0, 4000)
        if chain.before != "last":
            columns = tuple(map(math.prod, zip(before.p1, before.p2, strict=True)))
            whole = Triple(before.p0, (1,) * len(machine), columns)
            expected += 2 * boxing_s(boxing, machine, before, whole, (unit * written, 0))
        assert prices.cost(strategy) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("nodes", "p0", "ours", "theirs"),
    [(64, 4, 2, 3.75), (64, 2, 3.25, 7.75), (64, 8, 1.25, 1.75), (128, 4, 1.625, 3.875), (256, 4, 1.1875, 3.9375)],
)
def test_the_attention_layer_of_figure_3(nodes: int, p0: int, ours: float, theirs: float) -> None:
    (row,) = (row for row in figure_3().records if (row["nodes"], row["p0"]) == (nodes, p0))
    assert (row["found"], row["megatron"]) == (ours, theirs)
    if (nodes, p0) == (64, 4):
        assert (row["qkv"], row["projection"], row["next_best"]) == ("(4,8,2)", "(4,4,4)", 2.25)
        assert ours / theirs == 96 / 180


@pytest.mark.parametrize(
    ("nodes", "ours", "if_all_is_gathered", "theirs"),
    [
        (64, 9.5703125, 10.5703125, 15.0703125),
        (128, 8.03515625, 8.78515625, 15.53515625),
        (256, 5.767578125, 6.392578125, 15.767578125),
    ],
)
def test_four_linears_that_share_a_strategy(nodes: int, ours: float, if_all_is_gathered: float, theirs: float) -> None:
    """Gi elements, forward, backward and gradients; then as if the projection gathered what attention reads."""
    chain = transformer(8192, 2**20)
    prices = price(chain, counting(nodes), most_p0=4)
    assert exhaustive(prices)[0] / 4 / GI == ours
    assert min(map(prices.cost, megatron(prices))) / 4 / GI == theirs
    layers = list(chain.layers)
    layers[1] = replace(layers[1], inputs=3 * 8192, summed=8192 * 8192)
    prices = price(replace(chain, layers=layers), counting(nodes), most_p0=4)
    assert exhaustive(prices)[0] / 4 / GI == if_all_is_gathered


@pytest.mark.parametrize(
    ("devices", "boxing", "num_bytes", "ms", "chosen"),
    [
        (128, PAPER, 44_892_160, 4.969216, "(1,128,1) (2,4,16) (8,4,4) (8,2,8)"),
        (128, CHEAPEST, 44_892_160, 4.759216, None),
        (4096, PAPER, 31_602_688, 5.8113888, "(2,2048,1) (32,8,16) (32,8,16) (32,8,16)"),
        (4096, CHEAPEST, 31_209_472, 5.2490752, None),
    ],
)
def test_the_mlp_of_figure_8(devices: int, boxing: Boxing, num_bytes: int, ms: float, chosen: str | None) -> None:
    chain = mlp(FIGURE_8_WIDTHS, {128: 4096, 4096: 65536}[devices])
    started = time.perf_counter()
    assert found(price(chain, counting(devices), boxing))[0] == num_bytes
    cost, got = found(price(chain, flat(devices), boxing))
    assert time.perf_counter() - started < 6
    assert 1e3 * cost == pytest.approx(ms, rel=1e-12)
    assert chosen in (None, got)


def small() -> Prices:
    return price(mlp((256, 64, 128, 32), 64), flat(8))


def heuristics(prices: Prices) -> dict[str, Callable[[Random], Iterator[Evaluated]]]:
    beta = 30 / exhaustive(prices)[0]
    return {
        "descent": lambda random: coordinate_descent(prices, random),
        "metropolis": lambda random: metropolis_hastings(prices, random, beta),
        "random": lambda random: random_search(prices, random),
    }


@pytest.mark.parametrize("name", ["descent", "metropolis", "random"])
def test_a_search_is_determined_by_its_seed_and_finds_the_optimum_of_a_small_space(name: str) -> None:
    prices = small()
    search = heuristics(prices)[name]
    first, again, other = (list(islice(search(Random(seed)), 20_000)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(cost == prices.cost(strategy) for cost, strategy in first)
    assert min(first)[0] == pytest.approx(exhaustive(prices)[0])
    assert lowest_after(search(Random(1)), (1, 10, 500)) == [min(first[:n])[0] for n in (1, 10, 500)]


def differing(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def test_metropolis_hastings_always_accepts_what_is_cheaper_and_the_rest_by_beta() -> None:
    prices = small()
    tried = list(islice(metropolis_hastings(prices, Random(3), beta=0.0), 500))
    assert all(differing(a[1], b[1]) <= 1 for a, b in pairwise(tried))
    tried = list(islice(metropolis_hastings(prices, Random(3), beta=math.inf), 500))
    lowest = [min(tried[:n]) for n in range(1, 500)]
    assert all(differing(best[1], proposed[1]) <= 1 for best, proposed in zip(lowest, tried[1:], strict=True))


class Half(Random):
    """Draws one half where a number between 0 and 1 is asked for."""

    getrandbits = Random.getrandbits

    def random(self) -> float:
        return 0.5


def test_metropolis_hastings_accepts_what_is_dearer_with_probability_exp_of_minus_beta_times_how_much() -> None:
    prices = small()
    beta = 5 / exhaustive(prices)[0]
    tried = list(islice(metropolis_hastings(prices, Half(0), beta), 2000))
    (cost, at), accepted = tried[0], 0
    for new, proposed in tried[1:]:
        assert differing(at, proposed) <= 1
        if math.exp(-beta * (new - cost)) > 0.5:
            accepted += new > cost
            cost, at = new, proposed
    assert 10 < accepted < 1000


def test_coordinate_descent_ends_each_round_where_no_layer_alone_is_better() -> None:
    """A sweep tries all triples of all layers; the last of a round finds nothing better."""
    prices = small()
    states, layers = len(prices.triples), len(prices.alone)
    search, best, ends = coordinate_descent(prices, Random(0)), None, []
    for _ in range(40):
        lowest = min(islice(search, states * layers))
        if best == lowest:
            ends.append(best)
        best = None if best == lowest else lowest
    for cost, strategy in ends:
        for layer, state in product(range(layers), range(states)):
            assert prices.cost((*strategy[:layer], state, *strategy[layer + 1 :])) >= cost
    assert len(ends) > 5
    assert len(set(ends)) > 1


def test_the_searches_of_figure_8_are_in_the_paper_s_order() -> None:
    figure = figure_8()
    for devices, at in product((128, 4096), (1000, 10_000)):
        medians = {row["search"]: row["relative"] for row in figure.records if row["devices"] == devices
                   and row["evaluations"] in (at, {128: 36**4, 4096: 91**4}[devices])}  # fmt: skip
        assert medians["exhaustive"] == 1
        assert medians["coordinate descent"] == pytest.approx(1)
        assert medians["coordinate descent"] <= medians["Metropolis Hastings"] * (1 + 1e-9)
        assert medians["Metropolis Hastings"] + 0.05 < medians["random"]
    assert all(row["low"] <= row["relative"] <= row["high"] for row in figure.records)
    assert [[spread.name for spread in chart.spreads] for chart in figure.charts] == [
        ["coordinate descent", "Metropolis Hastings", "random"]
    ] * 2
    assert figure.charts[0].spreads[0].median[-1] == pytest.approx((math.log10(10_000 / 36**4), 1))
    ends = [tuple(points[-1][1] for points in (s.low, s.median, s.high)) for s in figure.charts[1].spreads]
    rows = {row["search"]: row for row in figure.records if row["devices"] == 4096 and row["evaluations"] == 10_000}
    assert ends == [(row["low"], row["relative"], row["high"]) for row in rows.values()]


def test_strategies_are_ranked_by_predicted_cost() -> None:
    rows = figure_4().records
    for machine, number in (("32 nodes", 7), ("2 nodes of 8", 9)):
        ranked = [row for row in rows if row["machine"] == machine]
        assert [row["rank"] for row in ranked] == list(range(1, number + 1))
        assert [row["ms"] for row in ranked] == sorted((row["ms"] for row in ranked), reverse=True)
        assert ranked[-1]["strategy"] == "found"
        assert "data parallel" in [row["strategy"] for row in ranked]


def test_no_gradient_of_figure_7_is_summed() -> None:
    rows = figure_7().records
    assert [row["weight_gradient_bytes"] for row in rows] == [0, 0, 0]
    assert [row["weight"] for row in rows] == ["(B:1, S1:2, S0:16)", "(B:1, S1:4, S0:8)", "(B:1, S1:2, S0:16)"]
    # 256 x 25088 x 4 bytes / 32 31/32 are exchanged, 256 x 25088 x 4 / 16 1/2 gathered
    assert rows[0]["boxing_bytes"] == 802_816 * 31 / 32 + 1_605_632 / 2


def test_vgg_saves_as_much_as_was_found_before() -> None:
    rows = [row for row in figure_9().records if row["model"] == "VGG-13"]
    saved = {(row["alpha_us"], row["nodes"]): round(row["saved"], 1) for row in rows}
    assert saved == {(0, 16): 3.8, (0, 32): 9.6, (0, 64): 17.8, (20, 16): 10.7, (20, 32): 20.2, (20, 64): 16.8}
    assert all(row["dp_ms"] > 4 * row["found_ms"] for row in rows)


def test_summa_overtakes_megatron_from_128_nodes_on_and_what_is_found_is_the_cheapest() -> None:
    rows = {row["nodes"]: row for row in figure_9().records if row["model"] == "GPT"}
    assert {nodes: row["summa_ms"] < row["megatron_ms"] for nodes, row in rows.items()} == {
        64: False, 128: True, 256: True
    }  # fmt: skip
    assert all(row["found_ms"] < min(row["summa_ms"], row["megatron_ms"]) for row in rows.values())


def test_summa_moves_data_once_and_weights_for_each_micro_batch() -> None:
    chain = Chain([Linear("", 32, 16)], 64, "last", element_bytes=1)
    assert list(meshes(4)) == [((1,), (4,)), ((2,), (2,)), ((4,), (1,))]
    assert summa(chain, counting(8), ((2,), (4,)), 1) == 3 * (64 * 32 / 2 * 3 / 4 + 32 * 16 / 4 / 2)
    assert summa(chain, counting(8), ((2,), (4,)), 4) == 3 * (64 * 32 / 2 * 3 / 4 + 4 * 32 * 16 / 4 / 2)


def test_megatron_is_every_mesh_of_data_and_model() -> None:
    prices = price(vgg13(64), counting(8))
    strategies = {" ".join(map(str, prices.triples_of(strategy))) for strategy in megatron(prices)}
    assert strategies == {
        "(8,1,1) (8,1,1) (8,1,1)",
        "(4,2,1) (4,1,2) (4,2,1)", "(4,1,2) (4,2,1) (4,1,2)",
        "(2,4,1) (2,1,4) (2,4,1)", "(2,1,4) (2,4,1) (2,1,4)",
        "(1,8,1) (1,1,8) (1,8,1)", "(1,1,8) (1,8,1) (1,1,8)",
    }  # fmt: skip


@pytest.mark.parametrize("side", [2, 4, 8])
def test_bytes_of_a_cube_of_devices_fall_with_the_power_two_thirds(side: int) -> None:
    """Of two square products, each of n² elements: 2 + 2 boxings and twice the gradient, n²/p^(2/3) (1 - p^(-1/3))."""
    n, devices = 512, side**3
    prices = price(Chain([Linear("", n, n)] * 2, n, "last", element_bytes=1), counting(devices))
    cube = (prices.triples.index(one(side, side, side)),) * 2
    assert prices.cost(cube) == pytest.approx(2 * 6 * n**2 / devices ** (2 / 3) * (1 - 1 / side))
    assert exhaustive(prices)[0] <= prices.cost(cube)
    assert min(map(prices.cost, megatron(prices))) > prices.cost(cube) or side == 2


def moves(state: tuple[int, ...], num_bytes: float, machine: Machine) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(seconds, next state) of a tensor on devices in powers of two for S0, S1, P and B."""
    for source, target, bits in product(range(4), range(4), range(1, 5)):
        if source == target or state[source] < bits or (target == 2 and source != 3):
            continue
        local = num_bytes / 2 ** (state[0] + state[1])
        size = {(True, True): local, (True, False): local * 2**bits}.get((source < 2, target < 2), local)
        once = 0.0 if source == 3 else ring(machine, (2**bits,), size)
        changed = [n - bits * (k == source) + bits * (k == target) for k, n in enumerate(state)]
        yield (2 * once if (source, target) == (2, 3) else once), tuple(changed)


@pytest.mark.parametrize("machine", [counting(16), flat(16), (Level(16, 1e-3, 1e10),)])
def test_no_path_of_collectives_and_slices_is_cheaper_than_the_cheapest(machine: Machine) -> None:
    num_bytes = 2.0**22
    bits = [tuple(factor[0].bit_length() - 1 for factor in triple) for triple in triples(machine)]
    for source, start in zip(triples(machine), bits, strict=True):
        begin = (start[0], start[1], start[2], 0)
        seconds, done, waiting = {begin: 0.0}, set(), [(0.0, begin)]
        while waiting:
            at, state = heapq.heappop(waiting)
            if state in done:
                continue
            done.add(state)
            for more, after in moves(state, num_bytes, machine):
                if at + more < seconds.get(after, math.inf):
                    seconds[after] = at + more
                    heapq.heappush(waiting, (at + more, after))
        for target, end in zip(triples(machine), bits, strict=True):
            found = boxing_s(CHEAPEST, machine, source, target, (num_bytes, num_bytes))
            assert found == pytest.approx(seconds[end[0], end[2], 0, end[1]]), (source, target)
