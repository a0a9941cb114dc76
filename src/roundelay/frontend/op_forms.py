"""The form of an operation: which dimensions of its tensors go together, so that they may be split together.

A form labels factors of dimensions. In ``linear``, x (..., k), w (n, k) and the result (..., n), every dimension has a
label: whoever has it is split when it is split, the others stay whole; a label that is in no result is summed over, and
the result is then partial. A factor without a label cannot be split: a softmax runs over it, for example. So OneFlow's
Table 1 follows from the form of a matrix product, and the signatures of all operations from their forms.

An operation whose form is not known here has no labels: each worker computes all of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from roundelay.frontend.keyed_rng import keyed_attention, keyed_dropout
from roundelay.ir.op_form import Dims, OpForm

aten = torch.ops.aten


class _Form(NamedTuple):
    """A form whose arguments are nodes, and which arguments are sizes of the result's dimensions, by position."""

    args: Mapping[Node, Dims]
    results: tuple[Dims, ...]
    linear: tuple[frozenset[Node], ...] = ()
    sizes: tuple[int, ...] = ()


Rule = Callable[[Node], _Form | None]


def op_form(node: Node) -> OpForm:
    """The form of a node of the exported graph; its ``meta`` has the shapes."""
    rule = _RULES.get(node.target)
    if rule is None and isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        rule = _pointwise
    made = rule(node) if rule is not None and _tensors(node) else None
    args, results, linear, sizes = made or _unknown(node)
    named = {arg.name: dims for arg, dims in args.items()}
    groups = tuple([frozenset([arg.name for arg in group]) for group in linear])
    return OpForm(named, results, groups, tuple(sizes), known=made is not None)


def shape_of(node: Node) -> tuple[Any, ...] | None:
    """The shape of a node's value, with symbolic sizes as expressions; None if it is no tensor."""
    value = node.meta.get("val")
    return tuple([_size(size) for size in value.shape]) if isinstance(value, torch.Tensor) else None


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _tensors(node: Node) -> list[Node]:
    return [arg for arg in node.all_input_nodes if shape_of(arg) is not None]


def _unknown(node: Node) -> _Form:
    """A form without labels, also for what has several results."""
    values = node.meta.get("val")
    parts = values if isinstance(values, (tuple, list)) else [values]
    results = tuple(_whole([_size(s) for s in part.shape]) for part in parts if isinstance(part, torch.Tensor))
    args = {arg: _whole(shape_of(arg) or ()) for arg in node.all_input_nodes if shape_of(arg) is not None}
    return _Form(args, results)


def _whole(shape: Sequence[Any]) -> Dims:
    return tuple(((None, size),) for size in shape)


def _labelled(shape: Sequence[Any], labels: Sequence[int | None]) -> Dims:
    return tuple(((label, size),) for label, size in zip(labels, shape, strict=True))


def _result(node: Node) -> tuple[Any, ...]:
    shape = shape_of(node)
    assert shape is not None
    return shape


def _pointwise(node: Node) -> _Form:
    """Dimensions are aligned at the end; one of size 1 is repeated."""
    shape = _result(node)
    args = {}
    for arg in _tensors(node):
        own = shape_of(arg) or ()
        first = len(shape) - len(own)
        args[arg] = tuple(((first + d if own[d] == shape[first + d] else None, own[d]),) for d in range(len(own)))
    return _Form(args, (_labelled(shape, range(len(shape))),), _linear_groups(node))


_LINEAR_IN_FIRST = {
    aten.neg.default, aten.alias.default, aten.clone.default, aten.detach.default, aten.to.dtype, aten.to.dtype_layout,
    aten.to.device, aten._to_copy.default, aten.contiguous.default, aten.lift_fresh_copy.default,
}  # fmt: skip
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_PRODUCTS = {aten.mul.Tensor}
_QUOTIENTS = {aten.div.Tensor}


def _linear_groups(node: Node) -> tuple[frozenset[Node], ...]:
    """In which of its tensors a pointwise operation is linear."""
    tensors = [arg for arg in node.args if isinstance(arg, Node) and shape_of(arg) is not None]
    if node.target in _LINEAR_IN_FIRST and tensors:
        return (frozenset(tensors[:1]),)
    if node.target in _SUMS and len(tensors) == 2:
        return (frozenset(tensors),)
    if node.target in _PRODUCTS and len(set(tensors)) == len(tensors):
        return tuple([frozenset([tensor]) for tensor in tensors])
    if node.target in _QUOTIENTS and tensors and tensors[0] is node.args[0] and tensors[0] not in tensors[1:]:
        return (frozenset(tensors[:1]),)
    return ()


def _product(node: Node, x: Node, w: Node, bias: Node | None, *, transposed: bool) -> _Form:
    """X (..., k) times w, (k, n) or as ``linear`` has it (n, k); plus a bias (n) or (..., n)."""
    shape, rows = _result(node), len(_result(node)) - 1
    k = rows + 1
    of_x = _labelled(shape_of(x) or (), [*range(rows), k])
    of_w = _labelled(shape_of(w) or (), [rows, k] if transposed else [k, rows])
    args, groups = {x: of_x, w: of_w}, [{x}, {w}]
    if bias is not None:
        own = shape_of(bias) or ()
        first = len(shape) - len(own)
        args[bias] = tuple(((first + d if own[d] == shape[first + d] else None, own[d]),) for d in range(len(own)))
        groups = [group | {bias} for group in groups]
    linear = tuple(map(frozenset, groups)) if x is not w else ()
    return _Form(args, (_labelled(shape, range(len(shape))),), linear)


def _linear(node: Node) -> _Form | None:
    x, w, *bias = node.args
    if not isinstance(x, Node) or not isinstance(w, Node) or len(shape_of(w) or ()) != 2:
        return None
    return _product(node, x, w, bias[0] if bias and isinstance(bias[0], Node) else None, transposed=True)


def _addmm(node: Node) -> _Form | None:
    bias, x, w = node.args[:3]
    if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
        return None
    return _product(node, x, w, bias, transposed=False)  # type: ignore[arg-type]


def _matmul(node: Node) -> _Form | None:
    x, w = node.args[:2]
    if not isinstance(x, Node) or not isinstance(w, Node) or x is w:
        return None
    left, right, shape = shape_of(x) or (), shape_of(w) or (), _result(node)
    if len(right) == 2 and len(left) >= 2:
        return _product(node, x, w, None, transposed=False)
    if len(left) < 3 or len(left) != len(right) or left[:-2] != right[:-2]:
        return None
    batch = range(len(left) - 2)
    m, n, k = len(batch), len(batch) + 1, len(batch) + 2
    args = {x: _labelled(left, [*batch, m, k]), w: _labelled(right, [*batch, k, n])}
    return _Form(args, (_labelled(shape, [*batch, m, n]),), (frozenset([x]), frozenset([w])))


def _view(node: Node) -> _Form | None:
    """Groups of dimensions whose products are equal are cut into common factors."""
    x = node.args[0]
    assert isinstance(x, Node)
    before, after = list(shape_of(x) or ()), list(_result(node))
    labels, own, new = count(), [[] for _ in before], [[] for _ in after]  # type: ignore[var-annotated]
    i = j = 0
    left, right = (before[0] if before else 1), (after[0] if after else 1)
    while i < len(before) and j < len(after):
        if left == right:
            common, left, right = left, 1, 1
        elif (quotient := _quotient(left, right)) is not None:
            common, left, right = right, quotient, 1
        elif (quotient := _quotient(right, left)) is not None:
            common, left, right = left, 1, quotient
        else:
            return None
        label = next(labels)
        own[i].append((label, common))
        new[j].append((label, common))
        # the next dimension on whichever side is used up
        if left == 1:
            i += 1
            left = before[i] if i < len(before) else 1
        if right == 1:
            j += 1
            right = after[j] if j < len(after) else 1
    rest = [*before[i:], *after[j:]]
    if any(size != 1 for size in rest):
        return None
    sizes = (1,) if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else ()
    args, results = {x: tuple(map(tuple, own))}, (tuple(map(tuple, new)),)
    return _Form(_filled(args, x, before), (_fill(results[0], after),), (frozenset([x]),), sizes)


def _filled(args: Mapping[Node, Dims], x: Node, shape: Sequence[Any]) -> Mapping[Node, Dims]:
    return {x: _fill(args[x], shape)}


def _fill(dims: Dims, shape: Sequence[Any]) -> Dims:
    """Dimensions of size 1 that have no factor yet."""
    return tuple(factors or ((None, size),) for factors, size in zip(dims, shape, strict=True))


def _quotient(a: Any, b: Any) -> Any | None:
    """A / b where it is a whole number, also of symbols; else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = a / b
    return quotient if getattr(quotient, "as_numer_denom", lambda: (quotient, 1))()[1] == 1 else None


def _permuted(node: Node, order: Sequence[int]) -> _Form:
    x = node.args[0]
    assert isinstance(x, Node)
    shape = shape_of(x) or ()
    labels = _labelled(shape, range(len(shape)))
    return _Form({x: labels}, (tuple(labels[d] for d in order),), (frozenset([x]),))


def _transpose(node: Node) -> _Form:
    rank = len(_result(node))
    a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    order = list(range(rank))
    order[a], order[b] = b, a
    return _permuted(node, order)


def _t(node: Node) -> _Form:
    return _permuted(node, list(range(len(_result(node))))[::-1])


def _permute(node: Node) -> _Form:
    rank = len(_result(node))
    return _permuted(node, [int(d) % rank for d in node.args[1]])  # type: ignore[union-attr,arg-type]


def _expand(node: Node) -> _Form:
    x, shape = node.args[0], _result(node)
    assert isinstance(x, Node)
    own = shape_of(x) or ()
    first = len(shape) - len(own)
    dims = tuple(((first + d if own[d] == shape[first + d] else None, own[d]),) for d in range(len(own)))
    return _Form({x: dims}, (_labelled(shape, range(len(shape))),), (frozenset([x]),), (1,))


def _along(node: Node, dim: int, *, linear: bool = True) -> _Form:
    """An operation along one dimension that leaves the others alone: slices, softmax."""
    x, shape = node.args[0], _result(node)
    assert isinstance(x, Node)
    own, rank = shape_of(x) or (), len(shape)
    labels = [None if d == dim % rank else d for d in range(rank)]
    groups = (frozenset([x]),) if linear else ()
    return _Form({x: _labelled(own, labels)}, (_labelled(shape, labels),), groups)


def _slice(node: Node) -> _Form:
    x, shape = node.args[0], _result(node)
    assert isinstance(x, Node)
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    if shape == shape_of(x):
        return _permuted(node, range(len(shape)))
    return _along(node, dim)


def _select(node: Node) -> _Form:
    x = node.args[0]
    assert isinstance(x, Node)
    own = shape_of(x) or ()
    dim = int(node.args[1]) % len(own)  # type: ignore[arg-type]
    labels = [None if d == dim else d for d in range(len(own))]
    kept = [d for d in range(len(own)) if d != dim]
    return _Form({x: _labelled(own, labels)}, (_labelled([own[d] for d in kept], kept),), (frozenset([x]),))


def _softmax(node: Node) -> _Form:
    return _along(node, int(node.args[1]), linear=False)  # type: ignore[arg-type]


def _split_sizes(node: Node) -> _Form | None:
    """Equal blocks of a dimension: each result has the labels of a block."""
    x, values = node.args[0], node.meta["val"]
    assert isinstance(x, Node)
    own, shapes = shape_of(x) or (), [[_size(s) for s in value.shape] for value in values]
    dim = int(node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(own)  # type: ignore[arg-type]
    if len({str(shape) for shape in shapes}) > 1 or not shapes:
        return None
    labels = list(range(len(own)))
    blocks = tuple(((None, len(shapes)), (d, shapes[0][d])) if d == dim else ((d, own[d]),) for d in range(len(own)))
    return _Form({x: blocks}, tuple(_labelled(shape, labels) for shape in shapes), (frozenset([x]),))


def _getitem(node: Node) -> _Form | None:
    source, index = node.args
    assert isinstance(source, Node)
    shape = shape_of(node)
    if shape is None or not isinstance(index, int):
        return None
    return _Form({}, (_labelled(shape, range(len(shape))),))


def _cat(node: Node) -> _Form | None:
    tensors, shape = node.args[0], _result(node)
    dim = int(node.args[1] if len(node.args) > 1 else 0) % len(shape)  # type: ignore[arg-type]
    labels = [None if d == dim else d for d in range(len(shape))]
    args: dict[Node, Dims] = {}
    for x in tensors:  # type: ignore[union-attr]
        assert isinstance(x, Node)
        own = shape_of(x) or ()
        args[x] = _whole(own) if len(own) != len(shape) else _labelled(own, labels)
    return _Form(args, (_labelled(shape, labels),), (frozenset(args),))


def _embedding(node: Node) -> _Form:
    w, index = node.args[:2]
    assert isinstance(w, Node)
    assert isinstance(index, Node)
    shape = _result(node)
    rows = list(range(len(shape) - 1))
    args = {w: _labelled(shape_of(w) or (), [None, len(rows)]), index: _labelled(shape_of(index) or (), rows)}
    return _Form(args, (_labelled(shape, [*rows, len(rows)]),), (frozenset([w]),))


def _layer_norm(node: Node) -> _Form:
    x, normalized = node.args[0], node.args[1]
    assert isinstance(x, Node)
    shape, last = _result(node), len(normalized)  # type: ignore[arg-type]
    labels = [d if d < len(shape) - last else None for d in range(len(shape))]
    args = {arg: _whole(shape_of(arg) or ()) for arg in _tensors(node)} | {x: _labelled(shape_of(x) or (), labels)}
    return _Form(args, (_labelled(shape, labels),))


def _attention(node: Node) -> _Form | None:
    """Q (..., L, E), k (..., S, E), v (..., S, V): batch and heads go together, and V with the result's."""
    q, k, v = node.args[:3]
    assert isinstance(q, Node)
    shape, left = _result(node), shape_of(q) or ()
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if node.kwargs.get("enable_gqa") or any((shape_of(n) or ())[:-2] != left[:-2] for n in (k, v)):  # type: ignore[arg-type]
        return None
    lead = list(range(len(left) - 2))
    args = {n: _labelled(shape_of(n) or (), [*lead, None, None]) for n in (q, k, v) if isinstance(n, Node)}
    if isinstance(mask, Node):
        own, first = shape_of(mask) or (), len(left) - len(shape_of(mask) or ())
        args[mask] = tuple(
            ((first + d if d < len(own) - 2 and own[d] == left[first + d] else None, own[d]),) for d in range(len(own))
        )
    return _Form(args, (_labelled(shape, [*lead, None, None]),))


def _reduced(node: Node) -> _Form | None:
    """A sum over dimensions, or all of them."""
    x = node.args[0]
    assert isinstance(x, Node)
    own, shape = shape_of(x) or (), _result(node)
    given = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple, int)) else range(len(own))
    dims = {int(d) % len(own) for d in ([given] if isinstance(given, int) else given)} if own else set()  # type: ignore[arg-type]
    kept = len(shape) == len(own)
    summed = node.target in (aten.sum.default, aten.sum.dim_IntList)
    labels = [d if d not in dims or summed else None for d in range(len(own))]
    results = [None if d in dims else d for d in range(len(own)) if kept or d not in dims]
    return _Form({x: _labelled(own, labels)}, (_labelled(shape, results),), (frozenset([x]),))


def _dropout(node: Node) -> _Form:
    x, shape = node.args[0], _result(node)
    assert isinstance(x, Node)
    labels = _labelled(shape, range(len(shape)))
    return _Form({x: labels}, (labels,), (frozenset([x]),))


def _squeeze(node: Node) -> _Form | None:
    return _view(node)


_RULES: dict[Any, Rule] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.flatten.using_ints: _squeeze,
    aten.unflatten.int: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.unsqueeze.default: _squeeze,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
    aten.split.Tensor: _split_sizes,
    aten.chunk.default: _split_sizes,
    operator.getitem: _getitem,
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
    aten.layer_norm.default: _layer_norm,
    aten.scaled_dot_product_attention.default: _attention,
    keyed_attention: _attention,
    aten.sum.default: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.mean.default: _reduced,
    keyed_dropout: _dropout,
    aten.contiguous.default: _pointwise,
    aten.clone.default: _pointwise,
    aten.to.dtype: _pointwise,
    aten.to.dtype_layout: _pointwise,
    aten.to.device: _pointwise,
    aten._to_copy.default: _pointwise,
    aten.detach.default: _pointwise,
    aten.alias.default: _pointwise,
    aten.silu.default: _pointwise,
    aten.gelu.default: _pointwise,
    aten.relu.default: _pointwise,
}
