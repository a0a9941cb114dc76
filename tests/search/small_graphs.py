"""Small random models as facts, and the price of every choice by formulas, to compare the search with."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from functools import cache

from roundelay.ir.deduction import ShardedOp
from roundelay.ir.graph import Graph, Op, Parameter, Profile, Value
from roundelay.ir.layout import Lay
from roundelay.ir.op_form import Dims, OpForm
from roundelay.ir.sbp import P, Split
from roundelay.lower.boxing import route
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.search.signatures.local_forms import LocalOp, local_ops
from roundelay.search.signatures.ways import State, letters, state, ways

ROWS = 4


class Drawn:
    """Operations on tensors of ROWS x 4: products with weights, functions, transposes of the columns, sums."""

    def __init__(self, seed: int, count: int) -> None:
        self.chance = random.Random(seed)
        self.ops: list[ShardedOp] = []
        self.weights: dict[str, Parameter] = {}
        last = ["input"]
        for i in range(count):
            kinds = ["product", "product", "function", "scaled"] + ["sum"] * (len(last) > 2)
            kind = "product" if i == 0 else self.chance.choice(kinds)
            args = self.chance.sample(last[1:], 2) if kind == "sum" else [last[-1] if i else "input"]
            self._add(kind, f"op{i}", args)
            last.append(f"op{i}")

    def _add(self, kind: str, name: str, args: list[str]) -> None:
        plain: Dims = (((0, ROWS),), ((1, 4),))
        if kind != "product":
            linear = (frozenset(args),) if kind != "function" else ()
            self.ops.append(ShardedOp(name, OpForm(dict.fromkeys(args, plain), (plain,), linear), 0.0))
            return
        heads = self.chance.random() < 0.3  # columns are read as two heads of two
        weight, columns = f"p_{name}", ((1, 2), (3, 2)) if heads else ((1, 4),)
        self.weights[weight] = Parameter(f"{name}.weight", (4, 4), 64 * self.chance.choice((1, 100)), True)
        groups = frozenset(args), frozenset([weight])
        form = OpForm(
            {args[0]: (((0, ROWS),), ((2, 4),)), weight: (columns, ((2, 4),))}, ((((0, ROWS),), columns),), groups
        )
        self.ops.append(ShardedOp(name, form, 1.0))

    def facts(self) -> MeshFacts:
        def value(name: str) -> Value:
            return Value(name, "tensor", (ROWS, 4), "float32", 64, True)

        ops = tuple(
            Op(op.name, "", "", tuple(a for a in op.form.args if a[:2] == "op"), (), (), int(op.flops), -1)
            for op in self.ops
        )
        values = {op.name: value(op.name) for op in self.ops}
        parameters = {own.name: own for own in self.weights.values()}
        graph = Graph(ops, (), (), (self.ops[-1].name,), values, parameters, {}, (), False, "", ROWS)
        return MeshFacts(graph, tuple(self.ops), {own.name: place for place, own in self.weights.items()})

    def profile(self) -> Profile:
        seconds = tuple([self.chance.random() * 300 for _ in range(len(self.ops) + 1)])
        return Profile(seconds, tuple([2 * own for own in seconds]), (0.0,) * len(seconds))


@cache
def sent(source: Lay, target: Lay, sizes: tuple[tuple[str, int], ...]) -> float:
    return float(route(source, target, sizes, 2).share)


def boxed(source: State, target: State, sizes: tuple[tuple[str, int], ...]) -> float:
    return sent(source.value, target.value, sizes) + sent(target.gradient, source.gradient, sizes)


def held(lay: Lay, mesh: Mapping[str, int]) -> float:
    return 1 / math.prod(mesh[axis] for axis, own in lay if isinstance(own, Split))


def brute_force(facts: MeshFacts, profile: Profile, mesh: Mapping[str, int], most: int) -> float | None:
    """The fewest seconds where a byte takes one; None if there are more than so many choices."""
    ops, sizes = local_ops(facts), tuple(mesh.items())
    weights = {place: facts.graph.parameters[name] for name, place in facts.places.items()}
    every = [ways(op, letters(op, frozenset(weights)), mesh) for op in ops]
    if math.prod(map(len, every)) > most:
        return None
    readers = {
        op.name: [(i, k) for i, reader in enumerate(ops) for k, n in enumerate(reader.form.args) if n == op.name]
        for op in ops
    }
    ends = [State(lay, lay) for lay in rows_or_whole(mesh)]
    least = math.inf
    lies = [
        [[state(op, way, k, mesh) for k in range(len(op.ports))] for way in own]
        for op, own in zip(ops, every, strict=True)
    ]
    for choice in itertools.product(*[range(len(own)) for own in every]):
        total = 0.0
        for i, op in enumerate(ops):
            way, own = every[i][choice[i]], lies[i][choice[i]]
            total += (profile.forward_s[i] + profile.backward_s[i]) / way.parts
            for k, name in enumerate(op.form.args):
                if name in weights:
                    copies = tuple([(axis, P) for axis, s in own[k].gradient if s == P])
                    total += sent(copies, (), sizes) * held(own[k].value, mesh) * weights[name].num_bytes
            wanted = [lies[j][choice[j]][k] for j, k in readers[op.name]]
            if op is ops[-1]:
                loss = profile.forward_s[-1] + profile.backward_s[-1]
                total += min(64 * boxed(own[-1], end, sizes) + loss * held(end.value, mesh) for end in ends)
            elif len(wanted) == 1 and passes_on(op, weights):
                total += 0.0 if wanted[0] == own[-1] else math.inf
            elif len(wanted) == 1:
                total += 64 * boxed(own[-1], wanted[0], sizes)
            elif wanted:
                hubs = {one for j, k in readers[op.name] for each in lies[j] for one in [each[k]]} | {
                    each[-1] for each in lies[i]
                }
                total += 64 * min(
                    boxed(own[-1], hub, sizes) + sum(boxed(hub, one, sizes) for one in wanted) for hub in hubs
                )
            if total >= least:
                break
        least = min(least, total)
    return least


def passes_on(op: LocalOp, weights: Mapping[str, object]) -> bool:
    return len(op.form.args) == 1 and not weights.keys() & op.form.args.keys()


def rows_or_whole(mesh: Mapping[str, int]) -> Iterator[Lay]:
    for count in range(len(mesh) + 1):
        for axes in itertools.permutations(mesh, count):
            if math.prod(mesh[axis] for axis in axes) <= ROWS:
                yield tuple((axis, Split(0)) for axis in axes)
