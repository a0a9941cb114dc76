"""AutoDDL's figures on communication, from its own costs and searches: what can be derived from the paper, beside it.

Seconds are those of declared links, and no measurements: the paper's α and β are not printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from statistics import median, quantiles

from roundelay.page.search_page import SearchChart, Spread
from roundelay.planner.autoddl.baselines import megatron, meshes, summa
from roundelay.planner.autoddl.boxing import CHEAPEST, PAPER, boxing_s
from roundelay.planner.autoddl.collectives import Level, Machine, counting
from roundelay.planner.autoddl.models import FIGURE_8_WIDTHS, attention, mlp, transformer, vgg13
from roundelay.planner.autoddl.prices import Prices, Strategy, gradient_s, price
from roundelay.planner.autoddl.searches import (
    Evaluated,
    coordinate_descent,
    exhaustive,
    lowest_after,
    metropolis_hastings,
    random_search,
)
from roundelay.planner.autoddl.space import Chain, data_parallel

Cell = str | int | float | None
Row = tuple[Cell, ...]

GI = 2**30
TOKENS, WIDTH = 2**20, 8192
"""Of the transformer on Piz Daint: 1,024 sequences of 1,024 tokens (Sect. 5.2.3)."""

MOST_COPIES, MICRO_BATCHES = 4, 16
"""Of Fig. 9's transformer, assumed: copies of a weight that memory allows, and micro-batches of a batch with SUMMA."""

DAINT_BYTES_PER_S = 8.5e9
"""The lower end of what Sect. 5.2.1 states."""

RUNS, MARKS = 10, tuple(round(10 ** (n / 8)) for n in range(16, 33))
"""Of Fig. 8: runs of each search, and after how many evaluations they are looked at."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as a table.

    Args:
        title: what it shows.
        columns: their names, each in one word.
        rows: a value for each column.
        notes: what must be known of the numbers.
        charts: to be drawn.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    notes: Sequence[str]
    charts: Sequence[SearchChart] = ()

    @property
    def records(self) -> list[dict[str, Cell]]:
        """The rows by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def figure_3() -> Figure:
    """Elements that an attention layer's forward communicates on one device."""
    return Figure(
        "AutoDDL, Figure 3: intermediate communication of an attention layer, Gi elements of a device",
        ["nodes", "p0", "qkv", "projection", "found", "next_best", "megatron"],
        [_attention_row(nodes, p0) for nodes, p0 in ((64, 4), (64, 2), (64, 8), (128, 4), (256, 4))],
        [
            "Forward only; 1,024 sequences of 1,024 tokens, width 8,192. p0: copies of a weight, which memory limits.",
            "The paper prints 2 and 3.75 for 64 nodes and p0 = 4; the triples (p0,p1,p2) are those of this search.",
        ],
    )


def _attention_row(nodes: int, p0: int) -> Row:
    prices = price(attention(WIDTH, TOKENS), counting(nodes), most_p0=p0)
    every = [state for state, triple in enumerate(prices.triples) if triple.p0 == (p0,)]
    ranked = sorted((prices.cost(strategy), strategy) for strategy in product(every, repeat=2))
    other = next(strategy for strategy in megatron(prices) if strategy[0] in every)
    qkv, projection = map(str, prices.triples_of(ranked[0][1]))
    costs = ranked[0][0], ranked[1][0], prices.cost(other)
    return nodes, p0, qkv, projection, *(cost / (2 * 4 * GI) for cost in costs)


def figure_4() -> Figure:
    """Strategies of one transformer on both of the paper's machines, the most expensive first."""
    daint, cloud = (Level(32, 20e-6, DAINT_BYTES_PER_S),), (Level(2, 20e-6, 12.5e9), Level(8, 5e-6, 600e9))
    machines = {"32 nodes": daint, "2 nodes of 8": cloud}
    return Figure(
        "AutoDDL, Figure 4: predicted communication of a transformer block, by strategy",
        ["machine", "rank", "strategy", "ms"],
        [row for name, machine in machines.items() for row in _ranking(name, machine)],
        [
            "The paper, which measured, names neither its model nor its eight strategies. Here they are Megatron's on "
            "every mesh, data parallelism, and what is found; width 4,096, 2^18 tokens.",
            "Assumed links: 20 µs and 8.5 GB/s; 20 µs and 12.5 GB/s between nodes, 5 µs and 600 GB/s within.",
        ],
    )


def _ranking(name: str, machine: Machine) -> Iterator[Row]:
    prices = price(transformer(4096, 2**18), machine)
    firsts = {strategy: prices.triples[strategy[0]] for strategy in megatron(prices)}
    costs = {f"Megatron {triple}": prices.cost(s) for s, triple in firsts.items() if math.prod(triple.p2) == 1}
    costs["data parallel"] = costs.pop(f"Megatron {data_parallel(machine)}")
    costs["found"] = exhaustive(prices)[0]
    for rank, (cost, strategy) in enumerate(sorted(((v, k) for k, v in costs.items()), reverse=True), 1):
        yield name, rank, strategy, 1e3 * cost


def figure_7() -> Figure:
    """VGG-13's dense layers on 32 devices."""
    chain, machine = vgg13(256), counting(32)
    prices = price(chain, machine)
    chosen = prices.triples_of(exhaustive(prices)[1])
    rows: list[Row] = []
    for k, (layer, state) in enumerate(zip(chain.layers, chosen, strict=True)):
        p0, p1, p2 = (factor[0] for factor in state)
        size, before = 4.0 * chain.rows * layer.inputs, chosen[k - 1] if k else data_parallel(machine)
        signatures = f"(S0:{p0}, B:{p1}, S1:{p2})", f"(B:{p0}, S1:{p1}, S0:{p2})", f"(S0:{p0}, S1:{p1}, P:{p2})"
        boxed = boxing_s(PAPER, machine, before, state, (size, size))
        rows.append((layer.name, *signatures, boxed, gradient_s(chain, machine, layer, state)))
    return Figure(
        "AutoDDL, Figure 7: the last three dense layers of VGG-13 on 32 devices",
        ["layer", "input", "weight", "output", "boxing_bytes", "weight_gradient_bytes"],
        rows,
        [
            "Batch 256, α = 0. Bytes of a device: of the boxing into the layer, in the forward and again in the "
            "backward, and of the sum of its weight's gradient. Before the first layer rows are split over all.",
        ],
    )


def figure_8() -> Figure:
    """Searches on the 4-layer MLP."""
    cases = [_Searched(128, 4096), _Searched(4096, 65536)]
    return Figure(
        "AutoDDL, Figure 8: searches on a 4-layer MLP",
        ["devices", "search", "evaluations", "low", "relative", "high", "ms", "triples"],
        [row for case in cases for row in case.rows()],
        [
            f"Relative: lowest cost found to the optimum, median and 90 % interval (low, high) of {RUNS} runs, by "
            "evaluations, not seconds. Exhaustive stands for so many strategies: a dynamic programme, which is exact.",
            "Assumed, as the paper does not say: 5 µs, 10 GB/s, batches of 4,096 and 65,536 samples in any layout, "
            "fp32; Metropolis-Hastings with beta = 30 / optimum. Cheapest path: boxings that the paper does not have.",
        ],
        [case.chart() for case in cases],
    )


class _Searched:
    """All searches on one number of devices."""

    def __init__(self, devices: int, batch: int) -> None:
        self.devices = devices
        chain, machine = mlp(FIGURE_8_WIDTHS, batch), (Level(devices, 5e-6, 1e10),)
        self.prices, self.cheapest = price(chain, machine), price(chain, machine, CHEAPEST)
        self.optimum = exhaustive(self.prices)[0]
        self.runs = {
            "coordinate descent": self._runs(coordinate_descent),
            "Metropolis Hastings": self._runs(partial(metropolis_hastings, beta=30 / self.optimum)),
            "random": self._runs(random_search),
        }

    def _runs(self, search: Callable[[Prices, Random], Iterator[Evaluated]]) -> list[list[float]]:
        searches = (search(self.prices, Random(seed)) for seed in range(RUNS))
        return [[cost / self.optimum for cost in lowest_after(found, MARKS)] for found in searches]

    def rows(self) -> Iterator[Row]:
        """The optimum with both kinds of boxings, and the searches after a thousand evaluations and after all."""
        for name, prices in (("exhaustive", self.prices), ("exhaustive, cheapest path", self.cheapest)):
            cost, strategy = exhaustive(prices)
            relative = (cost / self.optimum,) * 3
            yield self.devices, name, prices.num_strategies, *relative, 1e3 * cost, _text(prices, strategy)
        for name, at in product(self.runs, (1000, MARKS[-1])):
            yield self.devices, name, at, *self._spread(name, MARKS.index(at)), None, None

    def _spread(self, name: str, mark: int) -> tuple[float, float, float]:
        found = [run[mark] for run in self.runs[name]]
        twentieths = quantiles(found, n=20, method="inclusive")
        return twentieths[0], median(found), twentieths[-1]

    def chart(self) -> SearchChart:
        """The searches over evaluations, relative to the strategies that an exhaustive search has."""
        shares = [math.log10(mark / self.prices.num_strategies) for mark in MARKS]
        ends = {name: zip(*(self._spread(name, k) for k in range(len(MARKS))), strict=True) for name in self.runs}
        spreads = [Spread(name, *(list(zip(shares, end, strict=True)) for end in ends[name])) for name in ends]
        title, x_label = f"{self.devices:,} devices", f"evaluations / {self.prices.num_strategies:,} strategies, log10"
        return SearchChart(title, x_label, "cost / optimum", spreads)


def figure_9() -> Figure:
    """Weak scaling on Piz Daint: communication saved."""
    vgg, blocks = ((16, 10.0), (32, 18.0), (64, 29.0)), ((64, 23.9), (128, 46.4), (256, 35.3))
    rows = [
        *(_scaling("VGG-13", vgg13(8 * nodes), nodes, alpha, paper) for alpha in (0, 20) for nodes, paper in vgg),
        *(_scaling("GPT", transformer(WIDTH, TOKENS), nodes, 0, paper) for nodes, paper in blocks),
    ]
    return Figure(
        "AutoDDL, Figure 9: communication of a batch on Piz Daint",
        ["model", "nodes", "alpha_us", "dp_ms", "summa_ms", "megatron_ms", "found_ms", "saved", "paper", "triples"],
        rows,
        [
            "saved: % less than the second best; paper: the same, measured. 8.5 GB/s; α is assumed. Megatron "
            "and SUMMA are on their best meshes. VGG-13 with the gradients of its convolutions.",
            f"GPT: one block; assumed are p0 <= {MOST_COPIES} and {MICRO_BATCHES} micro-batches, for each of "
            "which SUMMA moves all weights.",
        ],
    )


def _scaling(model: str, chain: Chain, nodes: int, alpha_us: float, paper: float) -> Row:
    machine = (Level(nodes, 1e-6 * alpha_us, DAINT_BYTES_PER_S),)
    is_block = chain.before == "last"
    prices = price(chain, machine, most_p0=MOST_COPIES if is_block else None)
    found, strategy = exhaustive(prices)
    others = [math.nan, math.nan, min(map(prices.cost, megatron(prices)))]
    if is_block:
        others[1] = min(summa(chain, machine, mesh, MICRO_BATCHES) for mesh in meshes(nodes))
    else:
        others[0] = prices.cost((prices.triples.index(data_parallel(machine)),) * len(chain.layers))
    saved = 100 * (1 - found / min(seconds for seconds in others if not math.isnan(seconds)))
    milliseconds = (1e3 * seconds for seconds in (*others, found))
    return model, nodes, alpha_us, *milliseconds, saved, paper, _text(prices, strategy)


def _text(prices: Prices, strategy: Strategy) -> str:
    return " ".join(map(str, prices.triples_of(strategy)))


FIGURES: Mapping[int, Callable[[], Figure]] = {3: figure_3, 4: figure_4, 7: figure_7, 8: figure_8, 9: figure_9}
