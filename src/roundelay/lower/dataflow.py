"""Who makes and who reads every value that may travel: the one answer from which cuts are made and priced.

A value goes from where it is made to its first reader, from there to the second, and so on; its gradient comes back
along the same chain. One step of this chain is a :class:`Hop`. Wherever the cuts are, a hop travels on the edge between
the stages of its two ends, and stays at home if they are the same: :mod:`roundelay.lower.partition` makes the edges
from that, and :mod:`roundelay.planner.cost_model` their price.

Places are numbers of operations. Data is made at -1, before the first operation, by stage 0; the loss reads at n,
behind the last one, in the last stage. A parameter is made where it is first used; later users get it as
``weight.NAME``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from roundelay.ir.graph import BATCH, INPUT, WEIGHT, Graph


@dataclass(frozen=True, slots=True)
class Journey:
    """One value's way.

    Args:
        name: of the value.
        places: where it is made, then where it is read, in order.
    """

    name: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a value's way.

    Args:
        name: of the value.
        source: the operation that makes it or reads it before.
        target: the operation that reads it next.
        gradient: whether a gradient comes back.
    """

    name: str
    source: int
    target: int
    gradient: bool


def journeys(graph: Graph) -> list[Journey]:
    """The way of every value that anything reads, in order of production: operations, inputs, batch, parameters."""
    made = {op.name: i for i, op in enumerate(graph.ops)} | dict.fromkeys((*graph.inputs, *graph.batch), -1)
    reads: dict[str, list[int]] = {name: [] for name in made}
    weights: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.reads):
            reads[name].append(i)
        for name in dict.fromkeys(op.parameters):
            weights.setdefault(WEIGHT + name, []).append(i)
    for name in dict.fromkeys((*graph.outputs, *graph.batch)):
        reads[name].append(len(graph.ops))
    of_values = [Journey(name, (made[name], *places)) for name, places in reads.items() if places]
    return of_values + [Journey(name, tuple(places)) for name, places in weights.items()]


def hops(graph: Graph) -> list[Hop]:
    """Every step of every value's way, in order of production."""
    return [
        Hop(journey.name, max(source, 0), target, flows_back(graph, journey.name))
        for journey in journeys(graph)
        for source, target in pairwise(journey.places)
    ]


def flows_back(graph: Graph, name: str) -> bool:
    """Whether a gradient of this value travels back to where it came from."""
    if name.startswith((INPUT, BATCH)):
        return False
    if name.startswith(WEIGHT):
        return graph.parameters[name.removeprefix(WEIGHT)].trainable
    return graph.values[name].requires_grad


def share(graph: Graph, micro_batches: int) -> int:
    """How many micro-batches the sample, a whole batch, is cut into."""
    return max(1, min(micro_batches, graph.sample_rows // graph.min_rows))


def batch_bytes(graph: Graph, name: str, micro_batches: int) -> int:
    """Bytes of a value in all micro-batches of the sample together: a weight travels whole with each of them."""
    if name.startswith(WEIGHT):
        return graph.parameters[name.removeprefix(WEIGHT)].num_bytes * share(graph, micro_batches)
    return graph.values[name].num_bytes


def message_bytes(graph: Graph, names: Iterable[str], micro_batches: int) -> int:
    """Bytes of one message with these values, for one micro-batch."""
    return sum(batch_bytes(graph, name, micro_batches) for name in names) // share(graph, micro_batches)
