"""The search as a sum of tables: a variable for each cluster, for each value that several read, for each shared weight.

A value that several read is boxed once to its *hub*, and from there for each of them. Clusters that stand in the same
place of repeated modules, and are alike, are one variable.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import numpy as np

from roundelay.ir.graph import Graph, Parameter, Profile
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import P, Split
from roundelay.planner.mesh_signatures import MeshFacts, as_pattern
from roundelay.search.signatures.boxing_prices import Link, Table, scatter_share, share
from roundelay.search.signatures.clusters import Cluster, Clusters, Ops, States
from roundelay.search.signatures.local_forms import LocalOp, local_ops
from roundelay.search.signatures.spaces import Axes, Prices, Space
from roundelay.search.signatures.tables import Priced, Tables
from roundelay.search.signatures.ways import State, Way, letters

COMPUTE, BOXING, SUMS, GATHERS, AGAIN = "compute", "boxing", "gradient sums", "weight gathers", "computed again"
"""The terms of a batch's seconds."""

LEVELS = (1, 0, 3)
"""Of ZeRO (Rajbhandari and others, 2020): optimizer states, nothing, or weights and gradients too are in parts.

The first takes as long as the second, and less memory.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a batch is computed.

    Args:
        mesh: workers along each axis, by its name.
        links: between them.
        profile: seconds of operations on a whole micro-batch.
        micro_batches: of a batch.
        state_ratio: bytes of the optimizer's states for each byte of a trained weight.
        in_flight: micro-batches of which results are kept at once.
        parts: micro-batches whose values the graph has together.
    """

    mesh: Mapping[str, int] = field(hash=False)
    links: Mapping[str, Link] = field(hash=False)
    profile: Profile
    micro_batches: int = 1
    state_ratio: float = 2.0
    in_flight: int = 1
    parts: int = 1

    def scatter_s(self, axes: Sequence[str], num_bytes: float) -> float:
        """Seconds of a reduce-scatter along axes, one after another in the best order; of the all-gather back too.

        Axes of equal links are one.
        """
        sizes: dict[Link, int] = {}
        for axis in axes:
            sizes[self.links[axis]] = sizes.get(self.links[axis], 1) * self.mesh[axis]
        latency_s = sum(link.latency_s for link in sizes)
        return latency_s + num_bytes * scatter_share([(size, link) for link, size in sizes.items()])


T = TypeVar("T")


class Edge(NamedTuple):
    """A value from the variable that produces it, or its hub, to one that reads it; how it lies by the values of both.

    The reader is an operation's name, or the value's own where it is the hub.
    """

    value: str
    ends: tuple[int, int]
    states: tuple[States, States]
    reader: str


class Variable(NamedTuple):
    """What is chosen: the ways of clusters that are alike, how a weight is stored, or how a hub lies.

    Each has a variant for a level of ZeRO and whether what only passes on is computed again; by value and variant the
    terms of a batch's seconds, and bytes of a worker.
    """

    clusters: list[Cluster]
    weight: str
    states: States
    variants: tuple[tuple[int, bool], ...]
    terms: dict[str, Table]
    memory: Table


class Problem(NamedTuple):
    """What is searched: variables, the edges between them, their tables, and prices of boxings by value.

    Operations are repeatable whose results may be computed again: without weights, and read by one other.
    """

    variables: Sequence[Variable]
    edges: Sequence[Edge]
    tables: Tables
    prices: Mapping[str, Prices]
    repeatable: frozenset[str]


def problem(
    facts: MeshFacts,
    machine: Machine,
    space: Space | None = None,
    *,
    tied: bool = True,
    variants: bool = False,
    times: Mapping[str, int] | None = None,
    made: dict[Hashable, object] | None = None,
) -> Problem:
    """The tables of a model on a mesh.

    Args:
        facts: of the model.
        machine: where.
        space: of ways; by default all over whole axes.
        tied: whether repeated modules are computed alike.
        variants: whether weights may be in parts, and results computed again: as memory wants it.
        times: by name how many operations an operation stands for; by default one.
        made: what is kept for the same facts and space, with other times and micro-batches.
    """
    kept = {} if made is None else made
    return _Builder(facts, machine, space or Axes(machine.mesh), tied, variants, times or {}, kept).build()


class _Builder:
    def __init__(
        self,
        facts: MeshFacts,
        machine: Machine,
        space: Space,
        tied: bool,
        variants: bool,
        times: Mapping[str, int],
        made: dict[Hashable, object],
    ) -> None:
        self._made = made
        self._graph, self._machine, self._space = facts.graph, machine, space
        self._ops = self._once("ops", lambda: local_ops(facts))
        self._times = {name: times.get(op.name, 1) for op in self._ops for name in (op.name, *op.results)}
        self._weights = {place: facts.graph.parameters[name] for name, place in facts.places.items()}
        trained = {place: own.trainable for place, own in self._weights.items()}
        self._clusters = self._once("clusters", lambda: Clusters(self._ops, space, trained, facts.graph.outputs))
        self._variants = tuple([(n, again) for n in LEVELS for again in (False, True)]) if variants else ((0, False),)
        self._stands = _places_in_modules(facts.graph) if tied else {}
        self._seconds = {
            op.name: own
            for op, *own in zip(facts.graph.ops, machine.profile.forward_s, machine.profile.backward_s, strict=False)
        }
        reads = Counter(name for op in self._ops for name in op.form.args)
        self._repeatable = frozenset(
            op.name
            for op in self._ops
            if not _is_view(op)
            and not self._weights.keys() & op.form.args.keys()
            and all(reads[name] < 2 for name in op.results)
        )
        self._numbers: dict[Hashable, int] = {}
        self._variables: list[Variable] = []
        self._edges: list[Edge] = []

    def build(self) -> Problem:
        readers: dict[str, list[tuple[str, int, States]]] = defaultdict(list)
        producers: dict[str, tuple[int, States]] = {}
        for ops in self._all_clusters():
            number, own = self._add_cluster(ops)
            for (i, port), states in own.reads.items():
                readers[ops[i].ports[port][0]].append((ops[i].name, number, states))
            producers |= {name: (number, states) for name, states in zip(ops[-1].results, own.results, strict=True)}
        for name in self._graph.outputs:
            if name in producers:
                readers[name].append(self._add_loss(name))
        for place, weight in self._weights.items():
            own_readers = readers[place]
            if len(own_readers) > 1:
                states = self._once((place, "stored"), lambda: _all_stored([lies for *_, lies in readers[place]]))  # noqa: B023
                number = self._variable(place, len(states), self._variants, place, states)
                self._price_weight(weight, number, states, max(self._times[reader] for reader, *_ in own_readers))
                producers[place] = number, states
            elif own_readers:
                reader, number, states = own_readers[0]
                self._price_weight(weight, number, states, self._times[reader])
        for name, (number, states) in producers.items():
            self._add_edges(name, number, states, readers[name])
        return self._priced()

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])

    def _variable(
        self, key: Hashable, count: int, variants: tuple[tuple[int, bool], ...], weight: str = "", states: States = ()
    ) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._variables)
            terms = {term: np.zeros((count, len(variants))) for term in (COMPUTE, SUMS, GATHERS, AGAIN)}
            self._variables.append(Variable([], weight, states, variants, terms, np.zeros((count, len(variants)))))
        return self._numbers[key]

    def _all_clusters(self) -> Iterator[Ops]:
        """Those of the model; operations that cannot follow the one that chooses choose themselves."""
        for ops in self._clusters.of(self._ops):
            yield from [ops] if self._cluster(ops).ways else [(op,) for op in ops]

    def _forms(self, ops: Ops) -> Hashable:
        return _wiring(ops), *[self._clusters.form_key(op) for op in ops]

    def _cluster(self, ops: Ops) -> Cluster:
        return self._once(self._forms(ops), lambda: self._clusters.cluster(ops))

    def _add_cluster(self, ops: Ops) -> tuple[int, Cluster]:
        forms, made = self._forms(ops), self._cluster(ops)
        own = made._replace(ops=ops)
        stands = tuple([self._stands.get(op.name, op.name) for op in ops])
        number = self._variable((stands, forms), len(own.ways), self._variants)
        variable = self._variables[number]
        variable.clusters.append(own)
        for i, op in enumerate(ops):
            parts = self._once((forms, i), lambda: np.array([way[i].parts for way in own.ways]))  # noqa: B023
            each_s = [self._seconds[name] for name in {op.name, *op.results} if name in self._seconds]
            times = self._times[op.name]
            forward_s, backward_s = times * self._machine.micro_batches * np.sum(each_s, axis=0)[:, None] / parts
            held = times * sum([self._held(forms, own, i, port) for port in range(len(op.form.args), len(op.ports))])
            repeatable = op.name in self._repeatable
            for n, (_, again) in enumerate(variable.variants):
                variable.terms[COMPUTE][:, n] += forward_s + backward_s
                variable.terms[AGAIN][:, n] += forward_s * (again and repeatable)
                variable.memory[:, n] += held * (not (again and repeatable))
        return number, own

    def _held(self, forms: Hashable, own: Cluster, number: int, port: int) -> Table:
        """Bytes of a result that a worker keeps for the backward, by the cluster's ways."""
        op, mesh = own.ops[number], self._machine.mesh
        kept = self._machine.in_flight * (op.differentiable and not _is_view(op))

        def shares() -> Table:
            return np.array([share(self._clusters.state(op, way[number], port).value, mesh) for way in own.ways])

        return kept * self._size(op.ports[port][0])[1] * self._once((forms, number, port), shares)

    def _add_loss(self, name: str) -> tuple[str, int, States]:
        """The loss reads a value whole, or each worker some rows of it."""
        dims = tuple([((None if i else 0, size),) for i, size in enumerate(self._size(name)[0])])
        reader = LocalOp("loss", OpForm({name: dims}, ()), (), False)
        every = self._once(("loss", name), lambda: self._space.ways(reader, letters(reader, frozenset())))
        number = self._variable(("loss", name), len(every), ((0, False),))
        if name == self._graph.outputs[0]:
            profile = self._machine.profile
            seconds = self._machine.micro_batches * (profile.forward_s[-1] + profile.backward_s[-1])
            self._variables[number].terms[COMPUTE][:, 0] += [seconds / way.parts for way in every]
        return "loss", number, self._once(("reads", name), lambda: _reads(self._clusters, reader, every))

    def _price_weight(self, weight: Parameter, number: int, states: States, times: int) -> None:
        variable = self._variables[number]
        into = variable.terms[SUMS], variable.terms[GATHERS], variable.memory
        for n, (level, _) in enumerate(variable.variants):
            for table, column in zip(into, self._weight_prices(weight, states, level), strict=True):
                table[:, n] += times * column

    def _weight_prices(self, weight: Parameter, states: States, level: int) -> Table:
        what = weight.num_bytes, weight.trainable, level
        key = id(states), what, self._machine.micro_batches

        def prices() -> Table:
            return np.array([_weight_price(self._machine, read, *what) for read in states]).T

        return self._once(key, prices)

    def _add_edges(self, name: str, number: int, states: States, readers: Sequence[tuple[str, int, States]]) -> None:
        if readers and name not in self._weights and (self._space.full or len(readers) > 1):
            key = number, *[(own, self._stands.get(reader, reader)) for reader, own, _ in readers]
            every = self._once(key, lambda: self._hub({*states}.union(*[own for *_, own in readers])))
            hub = self._variable(key, len(every), ((0, False),))
            self._edges.append(Edge(name, (number, hub), (states, every), name))
            number, states = hub, every
        self._edges += [Edge(name, (number, own), (states, wanted), reader) for reader, own, wanted in readers]

    def _hub(self, states: Set[State]) -> States:
        """How a value may lie that is boxed to its readers."""
        every = sorted(states, key=str)
        if self._space.full:
            parts = [share(one.value, self._machine.mesh) * (1 + (one.value != one.gradient)) for one in every]
            least = min(parts)
            every = [one for one, part in zip(every, parts, strict=True) if part == least]
        return tuple(every)

    def _priced(self) -> Problem:
        machine, alike = self._machine, defaultdict[tuple[tuple[int, ...], float], list[Edge]](list)
        for edge in self._edges:
            alike[self._size(edge.value)].append(edge)
        prices = {size: self._prices(size, found) for size, found in alike.items()}
        own = [Priced(np.sum([*v.terms.values()], axis=0), v.memory.copy()) for v in self._variables]
        pairs: dict[tuple[int, ...], Priced] = {}
        for edge in self._edges:
            size = self._size(edge.value)
            key = *map(id, edge.states), size, machine.in_flight
            boxed = self._once(key, lambda: _boxed(edge.states, prices[size], size[1], machine))  # noqa: B023
            _add(own, pairs, edge.ends, boxed, self._times.get(edge.value, 1))
        by_value = {edge.value: prices[self._size(edge.value)] for edge in self._edges}
        return Problem(self._variables, self._edges, Tables(tuple(own), pairs), by_value, self._repeatable)

    def _prices(self, size: tuple[tuple[int, ...], float], edges: Sequence[Edge]) -> Prices:
        def prices() -> Prices:
            lays = {lay for edge in edges for states in edge.states for one in states for lay in one}
            return self._space.prices(lays, self._machine.links, size[1])

        return self._once(("prices", size), prices)

    def _size(self, name: str) -> tuple[tuple[int, ...], float]:
        """Shape, and bytes of one micro-batch."""
        if (weight := self._weights.get(name)) is not None:
            return weight.shape, float(weight.num_bytes)
        known = self._graph.values.get(name)
        return (known.shape, known.num_bytes / self._machine.parts) if known else ((), 0.0)


def _weight_price(
    machine: Machine, read: State, num_bytes: float, trained: bool, level: int
) -> tuple[float, float, float]:
    """Of a batch, seconds for sums of a weight's gradient and for its gathers; bytes of it and its states on a worker.

    Over an axis over which its gradient is partial there are copies of it, that may be in parts.
    """
    local = num_bytes * share(read.value, machine.mesh)
    if not trained:
        return 0.0, 0.0, local
    axes = [axis for axis, own in read.gradient if own == P]
    parts, once_s = math.prod(machine.mesh[axis] for axis in axes), machine.scatter_s(axes, local)
    if level == 3:
        return 0.0, 3 * machine.micro_batches * once_s, local / parts * (2 + machine.state_ratio)
    return 2 * once_s, 0.0, local * (2 + machine.state_ratio / (parts if level else 1))


def _reads(clusters: Clusters, reader: LocalOp, every: Sequence[Way]) -> States:
    return tuple([clusters.state(reader, way, 0) for way in every])


def _is_view(op: LocalOp) -> bool:
    """Whether it keeps nothing of its own: it is linear in the one tensor that it reads."""
    return len(op.form.args) == 1 and op.form.linear != ()


def _stored(read: State) -> State:
    """How a weight is stored that is read so: what is partial is made of the whole, on one worker alone."""
    return State(tuple([pair for pair in read.value if isinstance(pair[1], Split)]), read.gradient)


def _all_stored(reads: Sequence[States]) -> States:
    return tuple(sorted({_stored(read) for each in reads for read in each}, key=str))


def _boxed(states: tuple[States, States], prices: Prices, num_bytes: float, machine: Machine) -> Priced:
    """Seconds of a boxing, and bytes of what it makes."""
    sources, targets = states
    made = np.array([num_bytes * share(target.value, machine.mesh) for target in targets])
    numbers = {lay: i for i, lay in enumerate({one.value for one in (*sources, *targets)})}
    ends = [np.array([numbers[one.value] for one in own]) for own in states]
    other = ends[0][:, None] != ends[1]
    return Priced(machine.micro_batches * prices.of_states(sources, targets), machine.in_flight * other * made)


def _add(
    own: Sequence[Priced], pairs: dict[tuple[int, ...], Priced], ends: tuple[int, int], once: Priced, times: int
) -> None:
    """Add a table of two variables, or of one twice, so many times."""
    more = Priced(*[times * table for table in once]) if times > 1 else once
    if ends[0] == ends[1]:
        for table, diagonal in zip(own[ends[0]], map(np.diag, more), strict=True):
            table += diagonal[:, None]
        return
    scope, found = tuple(sorted(ends)), more if ends[0] < ends[1] else Priced(more.seconds.T, more.memory.T)
    before = pairs.get(scope)
    pairs[scope] = Priced(before.seconds + found.seconds, before.memory + found.memory) if before else found


def _wiring(ops: Ops) -> Hashable:
    """Which operation of a cluster reads which result of another."""
    made = {name: (i, k) for i, op in enumerate(ops) for k, name in enumerate(op.results)}
    return tuple([tuple([made.get(name) for name in op.form.args]) for op in ops])


def _places_in_modules(graph: Graph) -> dict[str, tuple[str, int]]:
    """Of operations in repeated modules of two products or more: the module's pattern, and their number in it."""
    products = Counter(path for op in graph.ops if op.flops and op.parameters for path in _numbered(op.module))
    counts: Counter[str] = Counter()
    found: dict[str, tuple[str, int]] = {}
    for op in graph.ops:
        if within := [path for path in _numbered(op.module) if products[path] > 1]:
            found[op.name] = as_pattern(within[-1]), counts[within[-1]]
            counts[within[-1]] += 1
    return found


def _numbered(module: str) -> list[str]:
    """The paths of the modules around, that end in a number, from the outermost."""
    steps = module.split(".")
    return [".".join(steps[: i + 1]) for i, step in enumerate(steps) if step.isdecimal()]
