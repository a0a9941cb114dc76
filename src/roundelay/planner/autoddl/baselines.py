"""What AutoDDL is compared with: Megatron and data parallelism, points of its space, and SUMMA, which is none."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roundelay.planner.autoddl.collectives import Factor, Machine, ring
from roundelay.planner.autoddl.prices import Prices, Strategy
from roundelay.planner.autoddl.space import Chain, Triple


def megatron(prices: Prices) -> Iterator[Strategy]:
    """Megatron's strategies on every 2-D mesh (data, model): layers split by columns and rows in turns, either first.

    With one part of data it is the 1-D form, with one of the model data parallelism.
    """
    number = {triple: k for k, triple in enumerate(prices.triples)}
    for triple in prices.triples:
        if math.prod(triple.p2) == 1:
            pair = number[triple], number[Triple(triple.p0, triple.p2, triple.p1)]
            for first in {0, math.prod(triple.p1) > 1}:
                yield tuple(pair[(k + first) % 2] for k in range(len(prices.alone)))


def meshes(devices: int) -> Iterator[tuple[Factor, Factor]]:
    """All (rows, columns) of a machine of one level."""
    return (((1 << n,), (devices >> n,)) for n in range(devices.bit_length()))


def summa(chain: Chain, machine: Machine, mesh: tuple[Factor, Factor], micro_batches: int) -> float:
    """Seconds of SUMMA on a mesh of rows x columns: I, W and O are split over both, nothing is replicated.

    Each of the products O = I W, dI = dO Wᵀ and dW = Iᵀ dO moves I's part (or dI's) among the columns and W's (or dW's)
    among the rows, as a ring does; W's for each micro-batch. Nothing is moved between layers.

    Args:
        chain: its layers; what lies before them costs nothing here.
        machine: the devices.
        mesh: its rows and its columns, all devices together.
        micro_batches: of a batch.
    """
    rows, columns = mesh
    seconds = 0.0
    for layer in chain.layers:
        data = chain.rows * layer.inputs * chain.element_bytes / micro_batches / math.prod(rows)
        weight = layer.inputs * layer.outputs * chain.element_bytes / math.prod(columns)
        seconds += 3 * micro_batches * (ring(machine, columns, data) + ring(machine, rows, weight))
    return seconds
