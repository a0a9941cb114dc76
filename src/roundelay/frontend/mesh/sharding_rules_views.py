"""The forms of operators that reshape, permute or repeat a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from roundelay.frontend.mesh.sharding_rules_base import (
    NodeForm,
    Rule,
    aligned,
    argument,
    dim_argument,
    first_tensor,
    numbered,
    others,
    result_shape,
)
from roundelay.ir.op_form import Dims, Factor

aten = torch.ops.aten


def _view(node: Node) -> NodeForm | None:
    """Groups of dimensions whose products are equal are cut into common factors."""
    (x, before), after = first_tensor(node), result_shape(node)
    cuts = _cuts(before, after)
    if cuts is None:
        return None
    own = _factors(before, [(i, factor) for i, _, factor in cuts])
    new = _factors(after, [(j, factor) for _, j, factor in cuts])
    sizes = (_SIZES_AT[node.target],) if node.target in _SIZES_AT else ()
    return NodeForm({x: own}, (new,), (frozenset([x]),), sizes)


_SIZES_AT: dict[Any, int] = {
    aten.view.default: 1,
    aten.reshape.default: 1,
    aten._unsafe_view.default: 1,
    aten.unflatten.int: 2,
}
"""Which argument of an operator lists sizes of the result."""


def _cuts(before: Sequence[Any], after: Sequence[Any]) -> list[tuple[int, int, Any]] | None:
    """The common factors of two shapes, each with its dimension in the one and in the other; None if there are none."""
    i, j, cuts = 0, 0, []
    sizes, new_sizes = [*before, 1], [*after, 1]
    left, right = sizes[0], new_sizes[0]  # what is still uncut of dimensions i and j
    while i < len(before) and j < len(after):
        shared = _shared(left, right)
        if shared is None:
            return None
        factor, left, right = shared
        cuts.append((i, j, factor))
        if left == 1:
            i += 1
            left = sizes[i]
        if right == 1:
            j += 1
            right = new_sizes[j]
    return cuts if all(size == 1 for size in (*sizes[i:], *new_sizes[j:])) else None


def _shared(a: Any, b: Any) -> tuple[Any, Any, Any] | None:
    """The smaller of two sizes, if it divides the other, and what is left of each."""
    if a == b:
        return a, 1, 1
    if (quotient := _quotient(a, b)) is not None:
        return b, quotient, 1
    if (quotient := _quotient(b, a)) is not None:
        return a, 1, quotient
    return None


def _quotient(a: Any, b: Any) -> Any | None:
    """A / b where it is a whole number, also of symbols; else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = a / b
    if getattr(quotient, "as_numer_denom", lambda: (quotient, 1))()[1] != 1:
        return None
    return int(quotient) if quotient.is_number else quotient


def _factors(shape: Sequence[Any], cuts: Sequence[tuple[int, Any]]) -> Dims:
    """The factors of each dimension, labelled in their order; a dimension of size 1 may have none of them."""
    found: list[list[Factor]] = [[] for _ in shape]
    for label, (d, factor) in enumerate(cuts):
        found[d].append((label, factor))
    return tuple(tuple(factors) or ((None, size),) for factors, size in zip(found, shape, strict=True))


def _view_as(node: Node) -> NodeForm | None:
    made, other = _view(node), node.args[1]
    if made is None or not isinstance(other, Node) or other is node.args[0]:
        return None
    return made._replace(args={**made.args, other: made.results[0]})


def _permuted(node: Node, order: Sequence[int]) -> NodeForm:
    x, shape = first_tensor(node)
    dims = numbered(shape)
    return NodeForm({x: dims}, (tuple(dims[d] for d in order),), (frozenset([x]),))


def _permute(node: Node) -> NodeForm:
    order: Any = node.args[1]
    ndim = len(result_shape(node))
    return _permuted(node, [int(d) % ndim for d in order])


def _reversed(node: Node) -> NodeForm:
    return _permuted(node, range(len(result_shape(node)))[::-1])


def _transpose(node: Node) -> NodeForm:
    ndim = len(result_shape(node))
    return _swapped(node, dim_argument(node, 1, ndim), dim_argument(node, 2, ndim))


def _swapped(node: Node, a: int, b: int) -> NodeForm:
    order = list(range(len(result_shape(node))))
    order[a], order[b] = order[b], order[a]
    return _permuted(node, order)


def _movedim(node: Node) -> NodeForm:
    ndim = len(result_shape(node))
    listed: list[Any] = [[arg] if isinstance(arg, int) else arg for arg in node.args[1:3]]
    moved = {int(new) % ndim: int(old) % ndim for old, new in zip(*listed, strict=True)}
    rest = iter(others(ndim, *moved.values()))
    return _permuted(node, [moved[d] if d in moved else next(rest) for d in range(ndim)])


def _pixel_shuffle(node: Node) -> NodeForm:
    """Channels go in squares of side r to places: what is split is the channels of the result, or the larger places."""
    (x, own), shape, r = first_tensor(node), result_shape(node), int(node.args[1])  # type: ignore[arg-type]
    few, many = (shape, own) if node.target is aten.pixel_shuffle.default else (own, shape)
    first = len(own) - 3
    deep = (*numbered(many)[:first], ((first, few[first]), (None, r * r)), *numbered(many)[first + 1 :])
    sides = [((d, many[d]), (None, r)) for d in range(first + 1, len(own))]
    flat = (*numbered(few)[: first + 1], *sides)
    dims = (deep, flat) if few is shape else (flat, deep)
    return NodeForm({x: dims[0]}, (dims[1],), (frozenset([x]),))


def _expand(node: Node) -> NodeForm:
    (x, own), shape = first_tensor(node), result_shape(node)
    return NodeForm({x: aligned(own, shape)}, (numbered(shape),), (frozenset([x]),), (1,))


def _expand_as(node: Node) -> NodeForm | None:
    made, other = _expand(node), node.args[1]
    if not isinstance(other, Node) or other is node.args[0]:
        return None
    return made._replace(args={**made.args, other: made.results[0]}, sizes=())


def _repeat(node: Node) -> NodeForm | None:
    """Several times one after the other: the times are the outer factor."""
    (x, own), shape = first_tensor(node), result_shape(node)
    first = len(shape) - len(own)
    results: list[tuple[Factor, ...]] = [((None, size),) for size in shape[:first]]
    for d, size in enumerate(own):
        times = _quotient(shape[first + d], size)
        if times is None:
            return None
        results.append(((d, size),) if times == 1 else ((None, times), (d, size)))
    return NodeForm({x: numbered(own)}, (tuple(results),), (frozenset([x]),))


def _repeat_interleave(node: Node) -> NodeForm | None:
    """Every element several times: the times are the inner factor."""
    (x, own), times, dim = first_tensor(node), node.args[1], argument(node, 2, node.kwargs.get("dim"))
    if not isinstance(dim, int) or not isinstance(times, int):
        return None
    dims = numbered(own)
    results = tuple((*factors, (None, times)) if d == dim % len(own) else factors for d, factors in enumerate(dims))
    return NodeForm({x: dims}, (results,), (frozenset([x]),))


VIEWS: dict[Any, Rule] = {
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.flatten.using_ints: _view,
    aten.unflatten.int: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.squeeze.default: _view,
    aten.unsqueeze.default: _view,
    aten.view_as.default: _view_as,
    aten.reshape_as.default: _view_as,
    aten.transpose.int: _transpose,
    aten.swapaxes.default: _transpose,
    aten.swapdims.default: _transpose,
    aten.t.default: _reversed,
    aten.numpy_T.default: _reversed,
    aten.mT.default: partial(_swapped, a=-2, b=-1),
    aten.permute.default: _permute,
    aten.movedim.int: _movedim,
    aten.movedim.intlist: _movedim,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_shuffle,
    aten.expand.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.expand_as.default: _expand_as,
    aten.repeat.default: _repeat,
    aten.tile.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
}
