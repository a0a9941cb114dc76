"""A GPT as the search over signatures sees one, of any size: operations with their forms, declared without torch.

A model of 175 billion parameters cannot be captured here, as capture needs its weights. What is declared is what
capture finds in `benchmarks/tensor_parallel/run.py` with one product for q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.planner.stages_on_hosts import PARTS, Layered
from roundelay.ir.deduction import ShardedOp
from roundelay.ir.graph import Graph, Op, Parameter, Profile, Value
from roundelay.ir.op_form import Dims, OpForm
from roundelay.planner.cost_model import FLOPS_PER_S, roofline
from roundelay.planner.mesh_signatures import MeshFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """Sizes of a GPT. GPT-3 is the default (Brown and others, 2020, Table 2.1); 2 bytes for each number."""

    width: int = 12288
    layers: int = 96
    heads: int = 96
    symbols: int = 50257
    length: int = 2048
    rows: int = 8
    bytes_each: int = 2


def declared(size: Gpt) -> MeshFacts:
    """What capture would find on so many rows."""
    return _Declaring(size).facts()


class _Declaring:
    def __init__(self, size: Gpt) -> None:
        self.size = size
        self.ops: list[ShardedOp] = []
        self.graph_ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.parameters: dict[str, Parameter] = {}

    def facts(self) -> MeshFacts:
        own = self.size
        rows, places, width = (0, own.rows), (1, own.length), (2, own.width)
        hidden: Dims = ((rows,), (places,), (width,))
        table: Dims = (((3, own.symbols),), (width,))
        self.parameter("symbols.weight", table)
        last = self.add(
            "symbols", "embedding", {"symbols.weight": table, "tokens": hidden[:2]}, hidden, ["symbols.weight"]
        )
        for i in range(own.layers):
            last = self.block(f"blocks.{i}", last)
        self.linear("head", self.norm("norm", last), own.symbols, bias=False)
        outputs = (self.ops[-1].name,)
        graph = Graph(tuple(self.graph_ops), (), (), outputs, self.values, self.parameters, {}, (), False, "", own.rows)
        return MeshFacts(graph, tuple(self.ops), {name: name for name in self.parameters})

    def block(self, name: str, last: str) -> str:
        own = self.size
        rows, places = (0, own.rows), (1, own.length)
        each = own.width // own.heads
        fused = self.linear(f"{name}.qkv", self.norm(f"{name}.norm1", last), 3 * own.width)
        heads: Dims = ((rows,), (places,), ((2, 3),), ((3, own.heads),), ((4, each),))
        split = self.add(
            f"{name}.split", "view", {fused: (*heads[:2], ((2, 3), (3, own.heads), (4, each)))}, heads, [fused]
        )
        one: Dims = (heads[0], heads[3], heads[1], heads[4])
        whole = tuple([tuple([(None if label == 2 else label, n) for label, n in dim]) for dim in heads])
        linear = (frozenset([split]),)
        self.values[f"{name}.unbind"] = Value(f"{name}.unbind", "other", (), "list", 0, True)
        self.graph_ops.append(Op(f"{name}.unbind", "unbind", name, (split,), (), (), 0, -1))
        self.ops.append(ShardedOp(f"{name}.unbind", OpForm({split: whole}, (one,) * 3, linear), 0.0))
        parts = [f"{name}.{part}" for part in "qkv"]
        for i, part in enumerate(parts):
            self.value(part, "getitem", one, (f"{name}.unbind",), 0, ())
            self.ops.append(ShardedOp(part, OpForm({}, (one,), ()), 0.0, (f"{name}.unbind", i)))
        kept = tuple([tuple([(None if label in (1, 4) else label, n) for label, n in dim]) for dim in one])
        flops = 4 * own.rows * own.length**2 * own.width
        mixed = self.add(f"{name}.attention", "attention", dict.fromkeys(parts, kept), kept, flops=flops)
        joined: Dims = ((rows,), (places,), ((3, own.heads), (4, each)))
        flat = self.add(f"{name}.join", "reshape", {mixed: one}, joined, [mixed])
        last = self.sum(f"{name}.sum1", last, self.linear(f"{name}.out", flat, own.width))
        up = self.linear(f"{name}.up", self.norm(f"{name}.norm2", last), 4 * own.width)
        hidden: Dims = ((rows,), (places,), ((2, 4 * own.width),))
        active = self.add(f"{name}.gelu", "gelu", {up: hidden}, hidden, ())
        return self.sum(f"{name}.sum2", last, self.linear(f"{name}.down", active, own.width))

    def norm(self, name: str, read: str) -> str:
        own = self.size
        width: Dims = (((None, own.width),),)
        args = {read: (((0, own.rows),), ((1, own.length),), *width)}
        for part in ("weight", "bias"):
            self.parameter(f"{name}.{part}", width)
            args[f"{name}.{part}"] = width
        return self.add(name, "layer_norm", args, args[read], ())

    def sum(self, name: str, first: str, second: str) -> str:
        dims: Dims = (((0, self.size.rows),), ((1, self.size.length),), ((2, self.size.width),))
        return self.add(name, "add", {first: dims, second: dims}, dims, [first, second])

    def linear(self, name: str, read: str, out: int, *, bias: bool = True) -> str:
        own = self.size
        inside = self.values[read].shape[-1]
        before: Dims = (((0, own.rows),), ((1, own.length),))
        args: dict[str, Dims] = {read: (*before, ((3, inside),)), f"{name}.weight": (((2, out),), ((3, inside),))}
        if bias:
            args[f"{name}.bias"] = (((2, out),),)
        for place in [*args][1:]:
            self.parameter(place, args[place])
        flops = 2 * own.rows * own.length * inside * out
        groups = [[arg, *[*args][2:]] for arg in [*args][:2]]
        return self.add(name, "linear", args, (*before, ((2, out),)), *groups, flops=flops)

    def add(
        self, name: str, target: str, args: dict[str, Dims], result: Dims, *linear: Sequence[str], flops: int = 0
    ) -> str:
        groups = tuple([frozenset(group) for group in linear if group])
        self.ops.append(ShardedOp(name, OpForm(args, (result,), groups), float(flops)))
        own = tuple([arg for arg in args if arg in self.parameters])
        return self.value(name, target, result, tuple([arg for arg in args if arg in self.values]), flops, own)

    def value(
        self, name: str, target: str, dims: Dims, reads: tuple[str, ...], flops: int, own: tuple[str, ...]
    ) -> str:
        shape = _shape(dims)
        self.values[name] = Value(name, "tensor", shape, "bfloat16", math.prod(shape) * self.size.bytes_each, True)
        module = name.rpartition(".")[0] if target in ("gelu", "add", "getitem") else name
        self.graph_ops.append(Op(name, target, module, reads, own, (), flops, -1))
        return name

    def parameter(self, name: str, dims: Dims) -> None:
        shape = _shape(dims)
        self.parameters[name] = Parameter(name, shape, math.prod(shape) * self.size.bytes_each, True, "bfloat16")


def _shape(dims: Dims) -> tuple[int, ...]:
    return tuple([math.prod(size for _, size in factors) for factors in dims])


def layered(size: Gpt, flops_per_s: float) -> Layered:
    """A GPT as stages are searched of it, on workers of so many operations a second."""

    def of_rows(rows: int) -> MeshFacts:
        return declared(replace(size, layers=2, rows=rows))

    parts = {op.name: _part(op.name) for op in of_rows(1).ops}
    boundary = float(size.length * size.width * size.bytes_each)
    return Layered(of_rows, partial(profile, flops_per_s=flops_per_s), parts, size.layers, boundary)


def _part(name: str) -> str:
    if name.startswith("blocks."):
        return PARTS[1] if name.startswith("blocks.0.") else PARTS[2]
    return PARTS[0] if name == "symbols" else PARTS[3]


def profile(facts: MeshFacts, flops_per_s: float) -> Profile:
    """What the roofline model predicts for a worker of so many operations a second."""
    rows, rate = roofline(facts.graph), FLOPS_PER_S / flops_per_s
    return Profile(*[tuple([own * rate for own in part]) for part in (rows.forward_s, rows.backward_s, rows.update_s)])
