"""The forms of operators that take parts of a tensor, join tensors, or look numbers up by an index."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from roundelay.frontend.mesh.sharding_rules_base import (
    NodeForm,
    Rule,
    aligned,
    along,
    arg_shape,
    argument,
    dim_argument,
    first_tensor,
    labelled,
    numbered,
    others,
    result_shape,
    result_shapes,
    shape_of,
    tensors_of,
    unlabelled,
    whole_along,
    whole_args,
)
from roundelay.ir.op_form import Dims

aten = torch.ops.aten


def _slice(node: Node) -> NodeForm:
    """Some of a dimension, often all of it; ``narrow`` likewise."""
    x, own = first_tensor(node)
    result, dim = result_shape(node), dim_argument(node, 1, len(own))
    if result == own and node.target is aten.slice.Tensor:
        return along(node)
    start = argument(node, 2)
    begin = 0 if start is None else start
    known = all(isinstance(size, int) for size in (begin, own[dim], result[dim])) and argument(node, 4, 1) == 1
    if not known or not result[dim]:
        return along(node, dim)
    block = math.gcd(own[dim], max(0, begin + own[dim] * (begin < 0)), result[dim])
    return NodeForm({x: _in_blocks(own, dim, block)}, (_in_blocks(result, dim, block),), (frozenset([x]),))


def _in_blocks(shape: Sequence[Any], dim: int, block: int) -> Dims:
    """Each dimension has its number as label, that one within blocks of this size."""
    dims = list(numbered(shape))
    if shape[dim] != block:
        dims[dim] = ((None, shape[dim] // block), (dim, block))
    return tuple(dims)


def _select(node: Node) -> NodeForm:
    """One place of a dimension, or each."""
    x, own = first_tensor(node)
    dim = dim_argument(node, 1, len(own))
    results = tuple(labelled(shape, others(len(own), dim)) for shape in result_shapes(node))
    return NodeForm({x: numbered(own, dim)}, results, (frozenset([x]),))


def _split_sizes(node: Node) -> NodeForm:
    """Consecutive parts of a dimension: all are split within blocks whose size divides theirs."""
    (x, own), shapes = first_tensor(node), result_shapes(node)
    dim = dim_argument(node, 2, len(own))
    sizes = [shape[dim] for shape in shapes]
    if len(set(sizes)) > 1 and not all(isinstance(size, int) for size in sizes):
        return along(node, dim)
    block = sizes[0] if len(set(sizes)) == 1 else math.gcd(*sizes)
    of_x = numbered(own) if len(sizes) == 1 else _in_blocks(own, dim, block)
    return NodeForm({x: of_x}, tuple(_in_blocks(shape, dim, block) for shape in shapes), (frozenset([x]),))


def _getitem(node: Node) -> NodeForm | None:
    """One of several results."""
    shape = shape_of(node)
    if shape is None or not isinstance(node.args[1], int):
        return None
    return NodeForm({}, (numbered(shape),))


def _cat(node: Node) -> NodeForm:
    tensors, shape = _listed(node), result_shape(node)
    dim = dim_argument(node, 1, len(shape))
    args: dict[Node, Dims] = {}
    for x in tensors:
        own = arg_shape(x)
        args[x] = numbered(own, dim) if len(own) == len(shape) else unlabelled(own)
    return NodeForm(args, (numbered(shape, dim),), (frozenset(args),))


def _stack(node: Node) -> NodeForm:
    tensors, shape = _listed(node), result_shape(node)
    dim = dim_argument(node, 1, len(shape))
    args = {x: labelled(arg_shape(x), others(len(shape), dim)) for x in tensors}
    return NodeForm(args, (numbered(shape, dim),), (frozenset(args),))


def _slice_scatter(node: Node) -> NodeForm | None:
    """A part of a dimension is replaced: that stays whole."""
    (x, own), part = first_tensor(node), node.args[1]
    if not isinstance(part, Node) or part is x:
        return None
    dim = dim_argument(node, 2, len(own))
    return NodeForm(
        {x: numbered(own, dim), part: numbered(arg_shape(part), dim)},
        (numbered(own, dim),),
        (frozenset([x, part]),),
    )


def _select_scatter(node: Node) -> NodeForm | None:
    """One place of a dimension is replaced."""
    (x, own), part = first_tensor(node), node.args[1]
    if not isinstance(part, Node) or part is x:
        return None
    dim = dim_argument(node, 2, len(own))
    of_part = labelled(arg_shape(part), others(len(own), dim))
    return NodeForm({x: numbered(own, dim), part: of_part}, (numbered(own, dim),), (frozenset([x, part]),))


def _listed(node: Node) -> list[Node]:
    """The tensors of an operation whose first argument lists them."""
    tensors: Any = node.args[0]
    return list(tensors)


def _index(node: Node) -> NodeForm | None:
    """One dimension is indexed by a tensor, whose dimensions stand in its place: the results of parts are added up."""
    listed: Any = node.args[1]
    indices = {d: index for d, index in enumerate(listed) if index is not None}
    return _indexed(node, *indices.popitem()) if len(indices) == 1 else None


def _index_select(node: Node) -> NodeForm | None:
    dim: Any = node.args[1]
    return _indexed(node, dim, node.args[2])


def _indexed(node: Node, dim: int, index: Any) -> NodeForm | None:
    x, own = first_tensor(node)
    places, dim = shape_of(index), dim % max(1, len(own))
    if not places or not own or index is x or index.meta["val"].dtype is torch.bool:
        return None
    new = range(len(own), len(own) + len(places))
    result = labelled(result_shape(node), [*range(dim), *new, *range(dim + 1, len(own))])
    of_x = numbered(own, *([] if _adds_up(x, own[dim]) else [dim]))
    return NodeForm({x: of_x, index: labelled(places, new)}, (result,), (frozenset([x]),))


def _adds_up(x: Node, size: Any) -> bool:
    """Whether a dimension of this size can be split: truth values cannot be added up, and a place must be known."""
    return isinstance(size, int) and x.meta["val"].dtype is not torch.bool


def _gather(node: Node) -> NodeForm | None:
    """One dimension is indexed; of the others the index may have less."""
    (x, own), index, shape = first_tensor(node), node.args[2], result_shape(node)
    if not isinstance(index, Node) or index is x or not shape:
        return None
    along_dim = dim_argument(node, 1, len(own))
    whole = [d for d in range(len(own)) if d == along_dim or own[d] != shape[d]]
    of_x = numbered(own, *[d for d in whole if d != along_dim or not _adds_up(x, own[d])])
    return NodeForm({x: of_x, index: numbered(shape, *whole)}, (numbered(shape, *whole),), (frozenset([x]),))


def _take_along_dim(node: Node) -> NodeForm | None:
    (x, own), index, dim = first_tensor(node), node.args[1], argument(node, 2)
    if not isinstance(index, Node) or index is x or dim is None or not own:
        return None
    shape, whole = result_shape(node), int(dim) % len(own)
    args = {x: aligned(own, shape), index: aligned(arg_shape(index), shape)}
    return whole_along(NodeForm(args, (numbered(shape),), (frozenset([x]),)), [whole])


def _scatter(node: Node) -> NodeForm | None:
    """Values replace, or are added to, what an index names along a dimension; of the others there may be less."""
    (x, own), index, values = first_tensor(node), node.args[2], node.args[3]
    if not own or len({x, index, values}) < 3:
        return None
    alike = [arg for arg in tensors_of(node) if len(arg_shape(arg)) == len(own)]
    less = [d for d in range(len(own)) if any(arg_shape(arg)[d] != own[d] for arg in alike)]
    whole = [dim_argument(node, 1, len(own)), *less]
    args = whole_args(node) | {arg: numbered(arg_shape(arg), *whole) for arg in alike}
    return NodeForm(args, (numbered(own, *whole),), (frozenset([x, values]),) if isinstance(values, Node) else ())


def _index_put(node: Node) -> NodeForm | None:
    """The first dimensions are indexed, and stay whole."""
    (x, own), values, listed = first_tensor(node), node.args[2], list(node.args[1])  # type: ignore[arg-type]
    first, given = len(listed), [index for index in listed if isinstance(index, Node)]
    whole = len(given) == first and not any(index.meta["val"].dtype is torch.bool for index in given)
    if not isinstance(values, Node) or not whole or len({x, values, *given}) < 2 + len(set(given)):
        return None
    behind, shape = len(own) - first, arg_shape(values)
    head, tail = (shape[: len(shape) - behind], shape[len(shape) - behind :]) if len(shape) > behind else ((), shape)
    of_values = unlabelled(head) + aligned(tail, own[first:], range(first, len(own)))
    dims = numbered(own, *range(first))
    args = {index: unlabelled(arg_shape(index)) for index in given} | {x: dims, values: of_values}
    return NodeForm(args, (dims,), (frozenset([x, values]),))


def _one_hot(node: Node) -> NodeForm:
    x, own = first_tensor(node)
    return NodeForm({x: numbered(own)}, (numbered(result_shape(node), -1),))


def _embedding(node: Node) -> NodeForm | None:
    """None where gradients are divided by how often a row is read: no worker alone knows that.

    Rows are split unless their gradient is sparse: it would have rows that were not read.
    """
    if argument(node, 3, False):
        return None
    w, index = (n for n in node.args[:2] if isinstance(n, Node))
    shape = result_shape(node)
    rows = others(len(shape), -1)
    by_rows = not argument(node, 4, False) and _adds_up(w, arg_shape(w)[0])
    args = {
        w: labelled(arg_shape(w), [len(rows) + 1 if by_rows else None, len(rows)]),
        index: labelled(arg_shape(index), rows),
    }
    return NodeForm(args, (numbered(shape),), (frozenset([w]),))


INDEXING: dict[Any, Rule] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _slice,
    aten.select.int: _select,
    aten.unbind.int: _select,
    aten.split.Tensor: _split_sizes,
    aten.split_with_sizes.default: _split_sizes,
    aten.chunk.default: _split_sizes,
    operator.getitem: _getitem,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.take_along_dim.default: _take_along_dim,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
    aten.index_add.default: _scatter,
    aten.index_copy.default: _scatter,
    aten.index_put.default: _index_put,
    aten.one_hot.default: _one_hot,
}
