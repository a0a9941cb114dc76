"""All costs of a chain in AutoDDL's space (Sect. 4.4), as tables: gradients by layer, boxings by pair of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from roundelay.planner.autoddl.boxing import PAPER, Boxing, boxing_s
from roundelay.planner.autoddl.collectives import Machine, all_reduce
from roundelay.planner.autoddl.space import Chain, Linear, Triple, data_parallel, triples

Strategy = tuple[int, ...]
"""Of each layer the number of its triple."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a batch costs in communication.

    Args:
        triples: of a layer, by number.
        alone: seconds by layer and its triple.
        between: seconds by layer, triple of the layer before and its own; before the first is the last.
        is_ring: whether the last layer's output is the first one's input.
    """

    triples: tuple[Triple, ...]
    alone: Sequence[Sequence[float]]
    between: Sequence[Sequence[Sequence[float]]]
    is_ring: bool

    @property
    def num_strategies(self) -> int:
        """How many strategies an exhaustive search stands for."""
        return math.prod(len(self.triples) for _ in self.alone)

    def cost(self, strategy: Strategy) -> float:
        """Seconds of a strategy."""
        seconds, before = 0.0, strategy[-1]
        for alone, between, state in zip(self.alone, self.between, strategy, strict=True):
            seconds += alone[state] + between[before][state]
            before = state
        return seconds

    def triples_of(self, strategy: Strategy) -> tuple[Triple, ...]:
        """The triples of a strategy."""
        return tuple(self.triples[state] for state in strategy)


def price(chain: Chain, machine: Machine, boxing: Boxing = PAPER, most_p0: int | None = None) -> Prices:
    """Price a chain: forward, backward, and the sums of weight gradients.

    Args:
        chain: the layers.
        machine: the devices.
        boxing: how boxings are made.
        most_p0: how many copies of a weight memory allows; None: any number.
    """
    states = triples(machine, most_p0)
    alone = [[gradient_s(chain, machine, layer, state) for state in states] for layer in chain.layers]
    between = [_table(chain, machine, boxing, k, states) for k in range(len(chain.layers))]
    if chain.before == "last":
        return Prices(states, alone, between, is_ring=True)
    for i, state in enumerate(states):
        alone[0][i] += first_s(chain, machine, boxing, state)
        alone[-1][i] += last_s(chain, machine, boxing, state)
    between[0] = [[0.0] * len(states)] * len(states)
    return Prices(states, alone, between, is_ring=False)


def gradient_s(chain: Chain, machine: Machine, layer: Linear, state: Triple) -> float:
    """Seconds to sum a layer's weight gradient."""
    elements = layer.inputs * layer.outputs if layer.summed is None else layer.summed
    return all_reduce(machine, state.p0, elements * chain.element_bytes / math.prod(state.p1 + state.p2))


def first_s(chain: Chain, machine: Machine, boxing: Boxing, state: Triple) -> float:
    """Seconds before the first layer: boxings from and back to split rows, sums of the gradients beside the chain."""
    if chain.before == "free":
        return 0.0
    rows, size = data_parallel(machine), float(chain.rows * chain.layers[0].inputs * chain.element_bytes)
    beside = all_reduce(machine, rows.p0, chain.replicated * chain.element_bytes)
    return 2 * boxing_s(boxing, machine, rows, state, (size, size)) + beside


def last_s(chain: Chain, machine: Machine, boxing: Boxing, state: Triple) -> float:
    """Seconds after the last layer, whose output is split over all devices."""
    size = chain.rows * chain.layers[-1].outputs * chain.element_bytes
    return 2 * boxing.gather(machine, state.p2, size / math.prod(state.p0 + state.p1))


def _table(chain: Chain, machine: Machine, boxing: Boxing, k: int, states: Sequence[Triple]) -> list[list[float]]:
    """Seconds of the boxing into layer k and of its mirror, by the triples of the layers before it and of its own."""
    unit = chain.rows * chain.element_bytes
    sizes = float(unit * chain.layers[k - 1].outputs), float(unit * chain.layers[k].inputs)
    found = [2 * boxing_s(boxing, machine, source, target, sizes) for source, target in product(states, repeat=2)]
    return [found[i : i + len(states)] for i in range(0, len(found), len(states))]
