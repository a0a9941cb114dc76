"""Small random models as all that a planner knows of them, and machines for them, without torch."""

from __future__ import annotations

import random
from dataclasses import replace

from roundelay.ir.deduction import ShardedOp
from roundelay.ir.graph import WEIGHT, Graph, Op, Parameter, Profile, Value
from roundelay.ir.op_form import Dims, OpForm, Varying
from roundelay.planner.cost_curve import Curve
from roundelay.planner.kept_bytes import SavedStorages
from roundelay.planner.machine_profile import LinkCosts, MachineProfile
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.planner.model_facts import AtRows, ModelFacts
from roundelay.planner.source import Divisibility, Hardware
from tests.planner.profiles import MEASURED, MIB

X, Y = "input.0", "batch.1"
ROWS = Varying("s0", 0)


class DrawnModel:
    """Products with weights, functions of one value, and sums of two, one behind the other."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.rows, self.width = chance.choice((4, 6, 8, 12, 16)), 1 << chance.randrange(2, 8)
        self._ops: list[Op] = []
        self._forms: list[ShardedOp] = []
        self._parameters: dict[str, Parameter] = {}
        for i in range(chance.randrange(4, 11)):
            before = [op.name for op in self._ops]
            kind = chance.choice(["product", "product", "function", "sum"]) if len(before) > 1 else "product"
            reads = chance.sample(before[:-1], 1) + before[-1:] if kind == "sum" else before[-1:] or [X]
            self._add(kind, f"op{i}", tuple(reads))

    def _add(self, kind: str, name: str, reads: tuple[str, ...]) -> None:
        plain: Dims = (((0, ROWS),), ((1, self.width),))
        if kind != "product":
            linear = (frozenset(reads),) if kind == "sum" else ()
            self._ops.append(Op(name, kind, "", reads, (), (), 0, -1))
            self._forms.append(ShardedOp(name, OpForm(dict.fromkeys(reads, plain), (plain,), linear), 0.0))
            return
        weight, flops = f"{name}.weight", 2 * self.rows * self.width**2
        self._parameters[weight] = Parameter(weight, (self.width, self.width), 4 * self.width**2, True)
        (x,), own = reads, f"p_{name}"
        form = OpForm(
            {x: (((0, ROWS),), ((2, self.width),)), own: (((1, self.width),), ((2, self.width),))},
            (plain,),
            (frozenset([x]), frozenset([own])),
        )
        self._ops.append(Op(name, kind, "", reads, (weight,), (), flops, -1))
        self._forms.append(ShardedOp(name, form, flops))

    def graph(self) -> Graph:
        """All operations, of which each may end a stage."""
        num_bytes = 4 * self.rows * self.width
        values = {
            name: Value(name, "tensor", (self.rows, self.width), "float32", num_bytes, name.startswith("op"))
            for name in (X, *(op.name for op in self._ops))
        }
        values[Y] = Value(Y, "tensor", (self.rows,), "int64", 8 * self.rows, False)
        cuts, last = tuple(range(len(self._ops) - 1)), self._ops[-1].name
        return Graph(
            tuple(self._ops), (X,), (Y,), (last,), values, self._parameters, {}, cuts, False, "drawn", self.rows
        )

    def facts(self, threads: tuple[int, ...]) -> ModelFacts:
        """With seconds of operations that differ by orders of magnitude; more threads take less, or a little more."""
        graph, scale, power = self.graph(), 10 ** self._chance.uniform(-5, -1), self._chance.uniform(0.3, 1)
        shares = [[self._chance.random() ** 3 for _ in range(len(graph.ops) + 1)] for _ in range(3)]

        def at(rows: int, count: int) -> AtRows:
            faster = count**-gain
            forward, backward, update = (tuple([scale * own * faster for own in column]) for column in shares)
            per_row = (rows / self.rows) ** power
            spent = Profile(tuple([per_row * s for s in forward]), tuple([per_row * s for s in backward]), update)
            return AtRows(rows, count, spent)

        gain = self._chance.uniform(-0.1, 1)
        sizes = sorted({max(1, self.rows // 8), self.rows // 2, self.rows})
        places = {name: f"p_{op.name}" for op in graph.ops for name in op.parameters}
        mesh = MeshFacts(graph, tuple(self._forms), places)
        return ModelFacts(
            precision="fp32",
            graph=graph,
            checkpointed=(),
            mesh=mesh,
            rewritten={},
            divisible={parts: Divisibility("mean", run=parts) for parts in (2, 8)},
            measured=tuple([at(rows, count) for count in sorted(threads) for rows in sizes]),
            saved=self._saved(graph),
            unused=(),
            whole={},
            state_bytes={name: 2 * own.num_bytes + 4 for name, own in self._parameters.items()},
            read_row_s=self._chance.choice((0.0, 1e-6, scale / 100)),
        )

    def _saved(self, graph: Graph) -> SavedStorages:
        """Each operation keeps what it reads."""
        sizes = {WEIGHT + name: own.num_bytes for name, own in graph.parameters.items()}
        sizes |= {name: graph.values[name].num_bytes for name in (X, Y, *(op.name for op in graph.ops))}
        places = {name: i for i, name in enumerate(sizes)}
        reads = [*(op.reads for op in graph.ops), (graph.ops[-1].name, Y)]
        return SavedStorages(tuple(sizes.values()), tuple([tuple(places[n] for n in own) for own in reads]), places, {})


def drawn_hardware(chance: random.Random) -> Hardware:
    """A host's cores."""
    cores = chance.choice((1, 2, 4, 8, 16))
    return Hardware(cores, cores)


def drawn_profile(chance: random.Random, transport: str) -> MachineProfile:
    """Links whose latency and speed differ by orders of magnitude, by kind and by how many take part."""

    def drawn(row: LinkCosts) -> LinkCosts:
        latency_s, bytes_per_s = row.group * 10 ** chance.uniform(-6, -3), 10 ** chance.uniform(7.5, 10.5)
        busy = chance.random()
        curves = [Curve(((0, part * latency_s), (MIB, part * (latency_s + MIB / bytes_per_s)))) for part in (1, busy)]
        return replace(row, seconds=curves[0], cpu=curves[1])

    own = {name: chance.uniform(1, 2) for name in MEASURED.together}
    instruction_s = 10 ** chance.uniform(-6, -4)
    links = tuple(map(drawn, MEASURED.links))
    return replace(MEASURED, transport=transport, together=own, instruction_s=instruction_s, links=links)
