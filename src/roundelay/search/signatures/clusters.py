"""Operations that are searched together: one that chooses, and before it those that only pass on what it reads.

A view or an elementwise function of one tensor that a single cluster reads runs in the signatures that this one wants,
and no boxing stands between them. Which its result has says which its argument has; where a function has no
such row, as one that is not linear has none for a partial tensor, neither has the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from roundelay.search.signatures.local_forms import LocalOp
from roundelay.search.signatures.spaces import Space
from roundelay.search.signatures.ways import State, Way, letters

States = tuple[State, ...]
"""One for each way of a cluster."""

Ops = tuple[LocalOp, ...]
"""Of a cluster, in order: the last one chooses."""


class Cluster(NamedTuple):
    """Some operations: for each way to compute them those of each, how they read tensors from outside, and the results.

    Reads are by the number of the operation and of its port; results are the last operation's.
    """

    ops: Ops
    ways: tuple[tuple[Way, ...], ...]
    reads: Mapping[tuple[int, int], States]
    results: tuple[States, ...]


class Clusters:
    """Makes clusters; the ways of operations of one form are enumerated once.

    Args:
        ops: of the whole model.
        space: of ways.
        parameters: names of the tensors that are parameters, and whether they are trained.
        outputs: names of values that the loss reads.
    """

    def __init__(
        self, ops: Sequence[LocalOp], space: Space, parameters: Mapping[str, bool], outputs: Iterable[str]
    ) -> None:
        self._space, self._parameters, self._outputs = space, frozenset(parameters), frozenset(outputs)
        self._with_gradient = {name for op in ops if op.differentiable for name in op.results}
        self._with_gradient |= {name for name, trained in parameters.items() if trained}
        self._ways: dict[Hashable, list[Way]] = {}
        self._inverses: dict[Hashable, dict[States, Way]] = {}

    def form_key(self, op: LocalOp) -> Hashable:
        """What two operations have in common that can be computed alike."""
        names = list(op.form.args)
        groups = tuple(sorted(tuple(sorted(map(names.index, group))) for group in op.form.linear))
        owned = tuple([(name in self._parameters, name in self._with_gradient) for name in names])
        return (
            tuple([dims for _, dims in op.ports]),
            groups,
            owned,
            op.form.reduction,
            op.differentiable,
            self._space.key(op),
        )

    def of(self, ops: Sequence[LocalOp]) -> list[Ops]:
        """The operations of all clusters."""
        readers: dict[str, list[str]] = defaultdict(list)
        for op in ops:
            for name in op.form.args:
                readers[name].append(op.name)
        chooses: dict[str, str] = {}
        for op in reversed(ops):
            own = {chooses[reader] for name in op.results for reader in readers[name]}
            chooses[op.name] = own.pop() if len(own) == 1 and self._passes_on(op, readers) else op.name
        members: dict[str, list[LocalOp]] = defaultdict(list)
        for op in ops:
            members[chooses[op.name]].append(op)
        return [tuple(each) for each in members.values()]

    def _passes_on(self, op: LocalOp, read: Mapping[str, Sequence[str]]) -> bool:
        if len(op.form.args) != 1 or {*op.form.args} & self._parameters or self._outputs & {*op.results}:
            return False
        return len(self._inverse(op, [bool(read[name]) for name in op.results])) == len(self.ways_of(op))

    def ways_of(self, op: LocalOp) -> list[Way]:
        """The ways of an operation."""
        if (key := self.form_key(op)) not in self._ways:
            self._ways[key] = self._space.ways(op, letters(op, self._parameters))
        return self._ways[key]

    def _inverse(self, op: LocalOp, read: Sequence[bool]) -> Mapping[States, Way]:
        """A way in which the results that are read lie so."""
        if (key := (self.form_key(op), *read)) not in self._inverses:
            ports = [len(op.form.args) + i for i, own in enumerate(read) if own]
            every = [(tuple([self.state(op, way, port) for port in ports]), way) for way in self.ways_of(op)]
            self._inverses[key] = dict(every)
        return self._inverses[key]

    def state(self, op: LocalOp, way: Way, port: int) -> State:
        """How a tensor lies, by its number among those that an operation reads and produces."""
        found = self._space.state(op, way, port)
        return found if op.ports[port][0] in self._with_gradient else State(found.value, ())

    def cluster(self, ops: Ops) -> Cluster:
        """The cluster of these operations."""
        inside = {name for op in ops[:-1] for name in op.results}
        outside = [(i, k) for i, op in enumerate(ops) for k, name in enumerate(op.form.args) if name not in inside]
        every = [self._backwards(ops, way, inside) for way in self.ways_of(ops[-1])]
        found = [own for own in every if own]
        reads = {(i, k): tuple([self.state(ops[i], own[i], k) for own in found]) for i, k in outside}
        ports = range(len(ops[-1].form.args), len(ops[-1].ports))
        results = [tuple([self.state(ops[-1], own[-1], port) for own in found]) for port in ports]
        return Cluster(ops, tuple(found), reads, tuple(results))

    def _backwards(self, ops: Ops, way: Way, inside: set[str]) -> tuple[Way, ...]:
        """The ways of all operations that follow from the last one's; none where one has none."""
        found = [way]
        lies: dict[str, State] = {}
        for i in range(len(ops) - 1, -1, -1):
            if i < len(ops) - 1:
                read = [name in lies for name in ops[i].results]
                wanted = tuple([lies[name] for name in ops[i].results if name in lies])
                if (own := self._inverse(ops[i], read).get(wanted)) is None:
                    return ()
                found.insert(0, own)
            for port, name in enumerate(ops[i].form.args):
                one = self.state(ops[i], found[0], port)
                if lies.setdefault(name, one) != one and name in inside:
                    return ()
        return tuple(found)
