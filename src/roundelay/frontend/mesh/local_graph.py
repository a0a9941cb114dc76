"""The graph of one worker of a mesh axis: plain operations on local tensors.

Every operation is that of the whole graph, with what its signatures ask for around it: a worker slices what it has
whole, masks or pads what is to be added up, and counts once what all contribute alike. Sizes in views are those of the
local result; random masks are slices of the whole tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.fx
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from roundelay.errors import PlanError
from roundelay.frontend.export.export import Exported
from roundelay.frontend.graph_run import is_mutable
from roundelay.frontend.mesh.sharding_rules_base import shape_of
from roundelay.frontend.mesh.split_lookup import LOOKUPS, split_amax
from roundelay.frontend.stages.keyed_rng import RngKey, keyed_attention, keyed_dropout
from roundelay.ir.deduction import Deduction, Row, Use
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import P_MAX, B, P, Signature, Split

aten = torch.ops.aten


class MeshRank(NamedTuple):
    """One worker of an axis: number ``part`` of ``parts``."""

    parts: int
    part: int


ONLY = MeshRank(1, 0)
"""Where there is no mesh."""

SplitFields = tuple[int, int, int]
"""The fields of a :class:`~roundelay.ir.sbp.Split`, as an argument of a function in a graph."""

Step = tuple[Callable[..., Any], dict[str, Any]]
"""A function of a tensor, and its other arguments."""


def local_graph(exported: Exported, forms: Mapping[str, OpForm], deduction: Deduction, at: MeshRank) -> Exported:
    """The exported graph as one worker runs it, with the boxings as operations that pass a value on.

    Raises:
        PlanError: a size that is split is not known before the run.
    """
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    boxed: dict[str, Node] = {}
    pending: dict[str, list[str]] = {}
    for box in deduction.boxes:
        pending.setdefault(box.value, []).append(box.name)
    for node in exported.module.graph.nodes:
        if node.op == "output":
            (results,) = node.args
            graph.output(tuple(_read(graph, copied, boxed, r, deduction.results[r.name], at) for r in results))
            continue
        if node.op == "call_function" and node.name in deduction.rows:
            copied[node] = _local_node(graph, copied, boxed, node, forms[node.name], deduction, at)
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
        for name in pending.get(node.name, ()):
            boxed[name] = graph.create_node("call_function", aten.alias.default, (copied[node],), {}, name)
            boxed[name].meta = dict(node.meta)
    return replace(exported, module=torch.fx.GraphModule(exported.module, graph))


def _local_node(
    graph: torch.fx.Graph,
    copied: Mapping[Node, Node],
    boxed: Mapping[str, Node],
    node: Node,
    form: OpForm,
    deduction: Deduction,
    at: MeshRank,
) -> Node:
    reads = {
        arg: _read(graph, copied, boxed, arg, deduction.uses[node.name, arg.name], at)
        for arg in node.all_input_nodes
        if (node.name, arg.name) in deduction.uses
    }
    for arg in node.args[:1] if is_mutable(node.target) else ():
        if isinstance(arg, Node) and arg in reads and reads[arg].meta.get("helper"):
            raise _written_in_parts(node)
    local = graph.node_copy(node, lambda n: reads.get(n) or copied[n])
    row = deduction.rows[node.name]
    split = next((own for own in row.results if isinstance(own, Split)), None)
    if split is not None:
        _localise(local, node, form, row, split, at)
    elif row.kind == "split" and node.target in LOOKUPS:
        _localise_lookup(local, node, row, at)
    elif P_MAX in row.results:
        local.target = split_amax
    return local


def _written_in_parts(node: Node) -> PlanError:
    return PlanError(
        f"operation {node.name!r}, which writes in place",
        got="a value of which each worker of the mesh has, or contributes, a part",
        expected="a new value",
        remedy="Compute a new tensor (torch.where, torch.cat, x = x + y), or leave --tensor-parallel out.",
    )


def _localise_lookup(local: Node, node: Node, row: Row, at: MeshRank) -> None:
    """Let a worker look up what its part has of the first tensor, whose indexed dimension is split."""
    table = node.args[0]
    assert isinstance(table, Node)
    own = row.args[table.name]
    assert isinstance(own, Split), "it is the only one with this dimension"
    local.target = LOOKUPS[node.target]
    local.kwargs = {**local.kwargs, "of": (astuple(own), tuple(at), _static(node, (shape_of(table) or ())[own.dim]))}


def _read(
    graph: torch.fx.Graph,
    copied: Mapping[Node, Node],
    boxed: Mapping[str, Node],
    arg: Node,
    use: Use,
    at: MeshRank,
) -> Node:
    """What an operation reads in place of a tensor."""
    value = boxed[use.value] if use.value in boxed else copied[arg]
    steps: list[Step] = [(count_once, {"first": at.part == 0})] if use.once else []
    if use.has != use.wanted:
        steps.append(_converted(use.has, use.wanted, at, _size_of(arg, use.has)))
    for function, options in steps:
        made = graph.create_node("call_function", function, (value,), options, f"{arg.name}_local")
        made.meta = dict(arg.meta) | {"helper": True}
        value = made
    return value


def _size_of(arg: Node, signature: Signature) -> int:
    shape = shape_of(arg) or ()
    return shape[signature.dim] if isinstance(signature, Split) else 0


def _converted(has: Signature, wanted: Signature, at: MeshRank, size: int) -> Step:
    """What makes the one signature from the other without anybody else."""
    if isinstance(wanted, Split) and has == B:
        return take_part, {"split": astuple(wanted), "at": tuple(at)}
    if wanted == P and has == B:
        return as_part, {"first": at.part == 0}
    assert isinstance(has, Split)
    assert wanted == P
    return put_part, {"split": astuple(has), "at": tuple(at), "size": size}


def _localise(local: Node, node: Node, form: OpForm, row: Row, split: Split, at: MeshRank) -> None:
    """Give an operation whose result is split the sizes of its part."""
    if node.target in _IN_PARTS:
        _localise_blocks(local, node, row, at)
        return
    if node.target in (aten.slice.Tensor, aten.narrow.default):
        _localise_slice(local, node, split, at)
    if node.target in _SQUEEZES:
        ones = [d for d, size in enumerate(shape_of(node.args[0]) or ()) if size == 1]  # type: ignore[arg-type]
        local.target, local.args = aten.squeeze.dims, (local.args[0], _squeezed(node, ones))
    local.target = _OF_ANY_STRIDES.get(node.target, local.target)
    own = _OF_A_PART.get(node.target)
    if own is not None:
        size = _static(node, (shape_of(node) or ())[split.dim])
        local.target = own
        local.kwargs = {**local.kwargs, "of": (astuple(split), tuple(at), size)}
    for position in form.sizes:
        sizes = list(local.args[position])  # type: ignore[arg-type]
        place = split.dim - _first_of_sizes(node)
        if 0 <= place < len(sizes):
            if sizes[place] != -1:
                sizes[place] = _local_size(local, node, sizes[place], split, at)
            given = row.args.get(str(node.args[0]))
            if -1 in sizes and isinstance(given, Split) and local.target is aten.reshape.default:
                local.target, local.kwargs = part_view, {"dims": (given.dim, place)}
            local.args = (*local.args[:position], sizes, *local.args[position + 1 :])


def _local_size(local: Node, node: Node, given: Any, split: Split, at: MeshRank) -> Any:
    """The size of a part: a number, or computed of the whole size where that varies with the batch."""
    if not isinstance(given, Node):
        return _local(node, split, (shape_of(node) or ())[split.dim], at)
    with local.graph.inserting_before(local):
        made = local.graph.call_function(part_size, (given,), {"split": astuple(split), "at": tuple(at)})
    made.meta = dict(given.meta) | {"helper": True}
    return made


_OF_ANY_STRIDES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}
"""What does the same for a part of a tensor, which need not be contiguous."""

_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}


def _squeezed(node: Node, ones: list[int]) -> list[int]:
    """The dimensions that go: a part of another may have size 1 as well."""
    rank, given = len(shape_of(node.args[0]) or ()), node.args[1:2]  # type: ignore[arg-type]
    asked = {int(d) % rank for d in tree_leaves(given)} if given else ones
    return [d for d in ones if d in asked]


def _first_of_sizes(node: Node) -> int:
    """The dimension of the result whose size comes first among the sizes."""
    if node.target is not aten.unflatten.int:
        return 0
    return int(node.args[1]) % len(shape_of(node.args[0]) or ())  # type: ignore[arg-type]


_IN_PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}


def _localise_blocks(local: Node, node: Node, row: Row, at: MeshRank) -> None:
    """Where a dimension that is taken apart is split, its parts become smaller."""
    shape, shapes = shape_of(node.args[0]) or (), [part.shape for part in node.meta["val"]]  # type: ignore[arg-type]
    dim = int(node.args[2] if len(node.args) > 2 else 0) % len(shape)  # type: ignore[arg-type]
    splits = [own for own in row.results if isinstance(own, Split) and own.dim == dim]
    if len(splits) == len(shapes):
        sizes = [_local(node, own, size[dim], at) for own, size in zip(splits, shapes, strict=True)]
        local.target, local.args = aten.split_with_sizes.default, (local.args[0], sizes, dim)


def _localise_slice(local: Node, node: Node, split: Split, at: MeshRank) -> None:
    """Where some of a dimension is taken and that is split, there is less in front of it and of it."""
    whole, part = shape_of(node.args[0]) or (), shape_of(node) or ()  # type: ignore[arg-type]
    dim = int(node.args[1] if len(node.args) > 1 else 0) % len(whole)  # type: ignore[arg-type]
    if dim == split.dim and (whole != part or node.target is aten.narrow.default):
        size, start = _local(node, split, part[dim], at), int(node.args[2] or 0)  # type: ignore[arg-type]
        begin = max(0, start + whole[dim] * (start < 0)) * size // part[dim]
        local.target, local.args = aten.narrow.default, (local.args[0], dim, begin, size)


def _local(node: Node, split: Split, size: Any, at: MeshRank) -> int:
    return split.local_size(_static(node, size), at.parts, at.part)


def _static(node: Node, size: Any) -> int:
    if not isinstance(size, int):
        raise PlanError(
            f"operation {node.name!r}, whose result is to be split",
            got=f"a size {size} that depends on the batch",
            expected="a size that is the same in every batch",
            remedy="Split another dimension.",
        )
    return size


def part_size(size: int, *, split: SplitFields, at: tuple[int, int]) -> int:
    """The size of one worker's part of a dimension."""
    return Split(*split).local_size(size, *at)


def part_view(x: torch.Tensor, sizes: Sequence[int], *, dims: tuple[int, int]) -> torch.Tensor:
    """``reshape`` of a part, in which a size may be -1 although the part is empty.

    Args:
        x: the part.
        sizes: of its result.
        dims: the split dimension of the part, and of the result.
    """
    if x.numel() > 0:
        return x.reshape(sizes)
    own, place = dims
    others = math.prod(x.shape[:own]) * math.prod(x.shape[own + 1 :])
    said = math.prod([size for d, size in enumerate(sizes) if d != place and size != -1])
    return x.reshape([x.shape[own] if d == place else others // said if n == -1 else n for d, n in enumerate(sizes)])


def take_part(x: torch.Tensor, *, split: SplitFields, at: tuple[int, int]) -> torch.Tensor:
    """The part of one worker of a whole tensor; its gradient is zero elsewhere."""
    of = Split(*split)
    pieces = [x.narrow(of.dim, start, end - start) for start, end in of.ranges(x.shape[of.dim], *at)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, of.dim)


def put_part(x: torch.Tensor, *, split: SplitFields, at: tuple[int, int], size: int) -> torch.Tensor:
    """A tensor of the whole shape with one worker's part in its place, zero elsewhere."""
    of, shape, taken = Split(*split), list(x.shape), 0
    shape[of.dim] = size
    whole = x.new_zeros(shape)
    for start, end in of.ranges(size, *at):
        whole = whole.slice_scatter(x.narrow(of.dim, taken, end - start), of.dim, start, end)
        taken += end - start
    return whole


class _AsPart(torch.autograd.Function):
    """All of a tensor on the first worker, zero on the others; the gradient is that of the sum, on every worker."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: bool) -> torch.Tensor:
        return x.view_as(x) if first else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _CountOnce(torch.autograd.Function):
    """The tensor itself; its gradient, the same on every worker, is counted on the first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: bool) -> torch.Tensor:
        ctx.first = first
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] if ctx.first else torch.zeros_like(grads[0]), None


def as_part(x: torch.Tensor, *, first: bool) -> torch.Tensor:
    """What a worker adds of a tensor that every worker has."""
    return _AsPart.apply(x, first)  # type: ignore[no-any-return,no-untyped-call]


def count_once(x: torch.Tensor, *, first: bool) -> torch.Tensor:
    """The tensor, whose gradient is the same on every worker, among others that contribute parts."""
    return _CountOnce.apply(x, first)  # type: ignore[no-any-return,no-untyped-call]


def split_dropout(
    x: torch.Tensor, p: float, train: bool, *, draw: RngKey, position: int, of: tuple[SplitFields, tuple[int, int], int]
) -> torch.Tensor:
    """``keyed_dropout`` of a part, with that part of the whole tensor's mask."""
    if not train or p == 0.0 or x.numel() == 0:
        return x
    split, at, size = of
    shape = list(x.shape)
    shape[split[0]] = size
    noise = torch.empty(shape, dtype=x.dtype, device=x.device)
    noise.bernoulli_(1.0 - p, generator=draw.generator(position, x.device))
    own = take_part(noise, split=split, at=at)
    return x * (own.div_(1.0 - p) if p < 1.0 else own)


def split_attention(*args: Any, of: tuple[SplitFields, tuple[int, int], int], **options: Any) -> torch.Tensor:
    """``keyed_attention`` of some heads, with their part of the whole mask."""
    return keyed_attention(*args, dropout=partial(split_dropout, of=of), **options)


_OF_A_PART: dict[Any, Callable[..., Any]] = {keyed_dropout: split_dropout, keyed_attention: split_attention}
