"""Dataflow of a graph: where every value is produced and where it is read.

A value goes from its producer to its first reader, from there to the second, and so on; its gradient comes back along
the same chain. One step of this chain is a :class:`Hop`. If the two ends of a hop are on different stages, it is sent
on the edge between these stages; if not, nothing is sent. :mod:`roundelay.lower.partition` derives the edges from that,
and :mod:`roundelay.planner.cost_model` their cost.

Positions are numbers of operations. Data is produced at -1, before the first operation, on stage 0. The loss reads at
n, after the last operation, on the last stage. A parameter is produced where it is first used; later users receive it
as ``weight.NAME``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from roundelay.ir.graph import BATCH, INPUT, WEIGHT, Graph


class ReaderChain(NamedTuple):
    """The chain of a value's readers.

    Args:
        name: name of the value.
        positions: where it is produced, then where it is read, in order.
    """

    name: str
    positions: tuple[int, ...]


class Hop(NamedTuple):
    """One step of a chain.

    Args:
        name: name of the value.
        source: the operation that produces it, or its previous reader.
        target: its next reader.
        gradient: whether a gradient comes back.
    """

    name: str
    source: int
    target: int
    gradient: bool


def reader_chains(graph: Graph) -> list[ReaderChain]:
    """Return the chain of every value that is read: operations in order, inputs, batch tensors, parameters."""
    produced = {op.name: i for i, op in enumerate(graph.ops)} | dict.fromkeys((*graph.inputs, *graph.batch), -1)
    reads: dict[str, list[int]] = {name: [] for name in produced}
    weights: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.reads):
            reads[name].append(i)
        for name in dict.fromkeys(op.parameters):
            weights.setdefault(WEIGHT + name, []).append(i)
    for name in dict.fromkeys((*graph.outputs, *graph.batch)):
        reads[name].append(len(graph.ops))
    of_values = [ReaderChain(name, (produced[name], *readers)) for name, readers in reads.items() if readers]
    return of_values + [ReaderChain(name, tuple(users)) for name, users in weights.items()]


def hops(graph: Graph, chains: Sequence[ReaderChain] = ()) -> list[Hop]:
    """Return every hop of every chain, in the order of :func:`reader_chains`, which may be given."""
    return [
        Hop(chain.name, max(source, 0), target, has_gradient(graph, chain.name))
        for chain in chains or reader_chains(graph)
        for source, target in pairwise(chain.positions)
    ]


def has_gradient(graph: Graph, name: str) -> bool:
    """Whether a gradient of this value is sent back to its producer."""
    if name.startswith((INPUT, BATCH)):
        return False
    if name.startswith(WEIGHT):
        return graph.parameters[name.removeprefix(WEIGHT)].trainable
    return graph.values[name].requires_grad


def sample_micro_batches(graph: Graph, micro_batches: int) -> int:
    """Return the number of micro-batches that the sample, a whole batch, is cut into."""
    return max(1, min(micro_batches, graph.sample_rows // graph.min_rows))


def batch_bytes(graph: Graph, name: str, micro_batches: int) -> int:
    """Return the bytes of a value over all micro-batches of the sample; a weight is sent whole with each of them."""
    if name.startswith(WEIGHT):
        return graph.parameters[name.removeprefix(WEIGHT)].num_bytes * sample_micro_batches(graph, micro_batches)
    return graph.values[name].num_bytes


def message_bytes(graph: Graph, names: Iterable[str], micro_batches: int) -> int:
    """Return the bytes of one micro-batch's message with these values."""
    return sum(batch_bytes(graph, name, micro_batches) for name in names) // sample_micro_batches(graph, micro_batches)
