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
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from roundelay.frontend.keyed_rng import keyed_attention, keyed_dropout
from roundelay.ir.op_form import Dims, Factor, OpForm

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
    rule = _rule(node.target)
    made = rule(node) if rule is not None and _tensors(node) else None
    args, results, linear, sizes = made or _unknown(node)
    named = {arg.name: dims for arg, dims in args.items()}
    groups = tuple([frozenset([arg.name for arg in group]) for group in linear])
    return OpForm(named, results, groups, tuple(sizes), known=made is not None)


def _rule(target: Any) -> Rule | None:
    """What makes the form of an operator; none for one that writes into a tensor, which must be all of it."""
    if not isinstance(target, torch._ops.OpOverload):
        return _RULES.get(target)
    if target._schema.is_mutable:
        return None
    return _RULES.get(target, _pointwise if torch.Tag.pointwise in target.tags else None)


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
    return _Form({arg: _whole(shape_of(arg) or ()) for arg in _tensors(node)}, tuple(map(_whole, _shapes(node))))


def _whole(shape: Sequence[Any]) -> Dims:
    return tuple(((None, size),) for size in shape)


def _labelled(shape: Sequence[Any], labels: Sequence[int | None]) -> Dims:
    return tuple(((label, size),) for label, size in zip(labels, shape, strict=True))


def _aligned(own: Sequence[Any], shape: Sequence[Any], labels: Sequence[int | None] = ()) -> Dims:
    """The labels of a shape, by default its dimensions' numbers, for one that is aligned with its end.

    A dimension of another size, which must be 1, is repeated and has none.
    """
    first, names = len(shape) - len(own), labels or range(len(shape))
    return tuple(((names[first + d] if size == shape[first + d] else None, size),) for d, size in enumerate(own))


def _shapes(node: Node) -> list[tuple[Any, ...]]:
    """The shapes of all results."""
    values = node.meta.get("val")
    parts = values if isinstance(values, (tuple, list)) else [values]
    return [tuple([_size(size) for size in part.shape]) for part in parts if isinstance(part, torch.Tensor)]


def _result(node: Node) -> tuple[Any, ...]:
    shape = shape_of(node)
    assert shape is not None
    return shape


def _read(node: Node) -> tuple[Node, tuple[Any, ...]]:
    """The first argument and its shape."""
    x = node.args[0]
    assert isinstance(x, Node)
    return x, shape_of(x) or ()


def _argument(node: Node, position: int, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else default


def _dims(given: Any, ndim: int) -> set[int]:
    """The dimensions that an argument of an operator lists; none means all of them."""
    listed = [given] if isinstance(given, int) else list(given or range(ndim))
    return {int(d) % ndim for d in listed} if ndim else set()


def _pointwise(node: Node) -> _Form:
    """Dimensions are aligned at the end; one of size 1 is repeated."""
    shapes = _shapes(node)
    args = {arg: _aligned(shape_of(arg) or (), shapes[0]) for arg in _tensors(node)}
    return _Form(args, tuple(_labelled(shape, range(len(shape))) for shape in shapes), _linear_groups(node))


def _as_type(node: Node) -> _Form:
    """The first argument alone counts; of another, the type is read."""
    x, own = _read(node)
    labels = _labelled(own, range(len(own)))
    args = {arg: _whole(shape_of(arg) or ()) for arg in _tensors(node)} | {x: labels}
    return _Form(args, (labels,), _linear_groups(node))


_LINEAR_IN_FIRST = {
    aten.neg.default, aten.alias.default, aten.clone.default, aten.detach.default, aten.to.dtype, aten.to.dtype_layout,
    aten.to.device, aten._to_copy.default, aten.contiguous.default, aten.lift_fresh_copy.default,
    aten.type_as.default,
}  # fmt: skip
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_PRODUCTS = {aten.mul.Tensor}
_QUOTIENTS = {aten.div.Tensor}


def _linear_groups(node: Node) -> tuple[frozenset[Node], ...]:
    """In which of its tensors a pointwise operation is linear."""
    tensors = [arg for arg in node.args if isinstance(arg, Node) and shape_of(arg) is not None]
    if node.target in _LINEAR_IN_FIRST and tensors:
        return (frozenset(tensors[:1]),) if not _rounds(node, tensors[0]) else ()
    if node.target is aten.broadcast_tensors.default:
        return (frozenset(_tensors(node)),)
    if node.target is aten.masked_fill.Scalar and node.args[2] == 0:
        return (frozenset(tensors[:1]),)
    if node.target in _SUMS and len(tensors) == 2:
        return (frozenset(tensors),)
    if node.target in _PRODUCTS and len(set(tensors)) == len(tensors):
        return tuple([frozenset([tensor]) for tensor in tensors])
    if node.target in _QUOTIENTS and tensors and tensors[0] is node.args[0] and tensors[0] not in tensors[1:]:
        return (frozenset(tensors[:1]),)
    return ()


def _rounds(node: Node, x: Node) -> bool:
    """Whether an operation makes integers of numbers, or truth values."""
    before, after = x.meta["val"].dtype, node.meta["val"].dtype
    return after is torch.bool or (before.is_floating_point and not after.is_floating_point and not after.is_complex)


def _product(node: Node, x: Any, w: Any, bias: Any = None, *, transposed: bool = False) -> _Form | None:
    """X (..., m, k) times w (..., k, n) or as ``linear`` has it (n, k), one a vector perhaps; plus a bias."""
    if not isinstance(x, Node) or not isinstance(w, Node) or len({x, w, bias}) < 3:
        return None
    left, right, shape = shape_of(x) or (), shape_of(w) or (), _result(node)
    batch = len(shape) - (len(left) > 1) - (len(right) > 1)
    m, n, k = range(batch, batch + 3)
    kept = [*range(batch), *[m][: len(left) - 1], *[n][: len(right) - 1]]
    of_x = _aligned(left[:-2], shape[:batch]) + _labelled(left[-2:], [m, k][-len(left) :])
    of_w = _aligned(right[:-2], shape[:batch]) + _labelled(right[-2:], [n, k] if transposed else [k, n][: len(right)])
    args, groups = {x: of_x, w: of_w}, [{x}, {w}]
    if isinstance(bias, Node):
        args[bias] = _aligned(shape_of(bias) or (), shape, kept)
        groups = [group | {bias} for group in groups]
    return _Form(args, (_labelled(shape, kept),), tuple(map(frozenset, groups)))


def _linear(node: Node) -> _Form | None:
    x, w = node.args[:2]
    if not isinstance(w, Node) or len(shape_of(w) or ()) != 2:
        return None
    return _product(node, x, w, _argument(node, 2), transposed=True)


def _addmm(node: Node) -> _Form | None:
    bias, x, w = node.args[:3]
    return _product(node, x, w, bias)


def _matmul(node: Node) -> _Form | None:
    return _product(node, *node.args[:2])


def _einsum(node: Node) -> _Form | None:
    """Every letter is a label."""
    equation, tensors = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    once = all(len(set(term)) == len(term) for term in terms) and len(set(tensors)) == len(tensors)
    if not arrow or "." in equation or not once:
        return None
    args = {x: _labelled(shape_of(x) or (), [ord(c) for c in term]) for x, term in zip(tensors, terms, strict=True)}
    sizes = {factor for dims in args.values() for factors in dims for factor in factors}
    if len({label for label, _ in sizes}) < len(sizes):  # a dimension of size 1 is repeated
        return None
    results = (_labelled(_result(node), [ord(c) for c in right]),)
    return _Form(args, results, tuple(frozenset([x]) for x in args))


def _convolution(node: Node, *, transposed: bool = False) -> _Form | None:
    """X (rows, i, ...), w (o, i, ...), bias (o): like a product; with groups only rows are split."""
    x, w, bias = *node.args[:2], _argument(node, 2)
    if not isinstance(x, Node) or not isinstance(w, Node) or len({x, w, bias}) < 3:
        return None
    own, weight = shape_of(x) or (), shape_of(w) or ()
    o, i = (1, 2) if _argument(node, 6, 1) == 1 else (None, None)
    rows, space = [0][: len(own) - len(weight) + 1], [None] * (len(weight) - 2)
    of_w = [i, o, *space] if transposed else [o, i, *space]
    args, groups = {x: _labelled(own, [*rows, i, *space]), w: _labelled(weight, of_w)}, [{x}, {w}]
    if isinstance(bias, Node):
        args[bias] = _labelled(shape_of(bias) or (), [o])
        groups = [group | {bias} for group in groups]
    return _Form(args, (_labelled(_result(node), [*rows, o, *space]),), tuple(map(frozenset, groups)))


def _view(node: Node) -> _Form | None:
    """Groups of dimensions whose products are equal are cut into common factors."""
    x, own_shape = _read(node)
    before, after = list(own_shape), list(_result(node))
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
    sizes = (_SIZES_AT[node.target],) if node.target in _SIZES_AT else ()
    args, results = {x: tuple(map(tuple, own))}, (tuple(map(tuple, new)),)
    return _Form(_filled(args, x, before), (_fill(results[0], after),), (frozenset([x]),), sizes)


_SIZES_AT = {
    aten.view.default: 1,
    aten.reshape.default: 1,
    aten._unsafe_view.default: 1,
    aten.unflatten.int: 2,
}
"""Which argument of an operator lists sizes of the result."""


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
    if getattr(quotient, "as_numer_denom", lambda: (quotient, 1))()[1] != 1:
        return None
    return int(quotient) if quotient.is_number else quotient


def _view_as(node: Node) -> _Form | None:
    made, other = _view(node), node.args[1]
    if made is None or not isinstance(other, Node) or other is node.args[0]:
        return None
    return made._replace(args={**made.args, other: made.results[0]})


def _permuted(node: Node, order: Sequence[int]) -> _Form:
    x, shape = _read(node)
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


def _mt(node: Node) -> _Form:
    rank = len(_result(node))
    return _permuted(node, [*range(rank - 2), rank - 1, rank - 2])


def _movedim(node: Node) -> _Form:
    rank = len(_result(node))
    source, target = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    order = [d for d in range(rank) if d != source]
    order.insert(target, source)
    return _permuted(node, order)


def _expand(node: Node) -> _Form | None:
    (x, own), shape = _read(node), _result(node)
    args, labels = {x: _aligned(own, shape)}, _labelled(shape, range(len(shape)))
    other = node.args[1]
    if isinstance(other, Node):  # expand_as
        return _Form({**args, other: labels}, (labels,), (frozenset([x]),)) if other is not x else None
    return _Form(args, (labels,), (frozenset([x]),), (1,))


def _repeat(node: Node) -> _Form | None:
    """Several times one after the other: the times are the outer factor."""
    (x, own), shape = _read(node), _result(node)
    first = len(shape) - len(own)
    results: list[tuple[Factor, ...]] = [((None, size),) for size in shape[:first]]
    for d, size in enumerate(own):
        times = _quotient(shape[first + d], size)
        if times is None:
            return None
        results.append(((d, size),) if times == 1 else ((None, times), (d, size)))
    return _Form({x: _labelled(own, range(len(own)))}, (tuple(results),), (frozenset([x]),))


def _repeat_interleave(node: Node) -> _Form | None:
    """Every element several times: the times are the inner factor."""
    (x, own), times, dim = _read(node), node.args[1], _argument(node, 2, node.kwargs.get("dim"))
    if not isinstance(dim, int) or not isinstance(times, int):
        return None
    labels = _labelled(own, range(len(own)))
    results = tuple((*factors, (None, times)) if d == dim % len(own) else factors for d, factors in enumerate(labels))
    return _Form({x: labels}, (results,), (frozenset([x]),))


def _along(node: Node, *dims: int, linear: bool = True) -> _Form:
    """An operation along some dimensions that leaves the others alone: slices, softmax, pooling."""
    x, own = _read(node)
    along = {dim % len(own) for dim in dims}
    labels = [None if d in along else d for d in range(len(own))]
    groups = (frozenset([x]),) if linear else ()
    return _Form({x: _labelled(own, labels)}, tuple(_labelled(shape, labels) for shape in _shapes(node)), groups)


def _along_dim(node: Node, *, at: int = 1, default: Any = -1, linear: bool = True) -> _Form:
    """An operation along the dimensions that an argument lists."""
    _, own = _read(node)
    return _along(node, *_dims(_argument(node, at, default), len(own)), linear=linear)


def _along_last(node: Node, *, last: int, linear: bool = True) -> _Form:
    """An operation along so many of the last dimensions."""
    return _along(node, *range(-last, 0), linear=linear)


def _pad(node: Node) -> _Form:
    pairs = list(node.args[1])  # type: ignore[arg-type]
    padded = [-1 - i // 2 for i, width in enumerate(pairs) if width != 0]
    return _along(node, *padded, linear=not _argument(node, 3))


def _slice(node: Node) -> _Form:
    (_, own), shape = _read(node), _result(node)
    if shape == own:
        return _permuted(node, range(len(shape)))
    return _along(node, int(_argument(node, 1, 0)))


def _select(node: Node) -> _Form:
    """One place of a dimension, or each."""
    x, own = _read(node)
    dim = int(_argument(node, 1, 0)) % len(own)
    labels = [None if d == dim else d for d in range(len(own))]
    kept = [d for d in range(len(own)) if d != dim]
    results = tuple(_labelled(shape, kept) for shape in _shapes(node))
    return _Form({x: _labelled(own, labels)}, results, (frozenset([x]),))


def _split_sizes(node: Node) -> _Form:
    """Equal blocks of a dimension: each result has the labels of a block."""
    (x, own), shapes = _read(node), _shapes(node)
    dim = int(_argument(node, 2, 0)) % len(own)
    if len(set(shapes)) > 1:
        return _along(node, dim)
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
    dim = int(_argument(node, 1, 0)) % len(shape)
    labels = [None if d == dim else d for d in range(len(shape))]
    args: dict[Node, Dims] = {}
    for x in tensors:  # type: ignore[union-attr]
        assert isinstance(x, Node)
        own = shape_of(x) or ()
        args[x] = _whole(own) if len(own) != len(shape) else _labelled(own, labels)
    return _Form(args, (_labelled(shape, labels),), (frozenset(args),))


def _stack(node: Node) -> _Form:
    tensors, shape = list(node.args[0]), _result(node)  # type: ignore[arg-type]
    dim = int(_argument(node, 1, 0)) % len(shape)
    kept = [d for d in range(len(shape)) if d != dim]
    args = {x: _labelled([shape[d] for d in kept], kept) for x in tensors if isinstance(x, Node)}
    labels = [None if d == dim else d for d in range(len(shape))]
    return _Form(args, (_labelled(shape, labels),), (frozenset(args),))


def _index(node: Node) -> _Form | None:
    """One dimension is indexed by a tensor, whose dimensions stand in its place."""
    indices = list(node.args[1])  # type: ignore[arg-type]
    given = [d for d, index in enumerate(indices) if index is not None]
    if len(given) != 1 or indices[given[0]] is node.args[0]:
        return None
    return _indexed(node, given[0], indices[given[0]])


def _index_select(node: Node) -> _Form | None:
    return _indexed(node, int(node.args[1]), node.args[2])  # type: ignore[arg-type]


def _indexed(node: Node, dim: int, index: Any) -> _Form | None:
    x, own = _read(node)
    places, dim = shape_of(index), dim % len(own)
    if not places or index.meta["val"].dtype is torch.bool:
        return None
    labels = [None if d == dim else d for d in range(len(own))]
    new = range(len(own), len(own) + len(places))
    args = {x: _labelled(own, labels), index: _labelled(places, new)}
    return _Form(args, (_labelled(_result(node), [*labels[:dim], *new, *labels[dim + 1 :]]),), (frozenset([x]),))


def _gather(node: Node) -> _Form | None:
    """One dimension is indexed; of the others the index may have less."""
    (x, own), dim, index, shape = _read(node), node.args[1], node.args[2], _result(node)
    if not isinstance(index, Node) or index is x or not shape:
        return None
    along = int(dim) % len(own)  # type: ignore[arg-type]
    labels = [None if d == along or own[d] != shape[d] else d for d in range(len(own))]
    return _Form(
        {x: _labelled(own, labels), index: _labelled(shape, labels)}, (_labelled(shape, labels),), (frozenset([x]),)
    )


def _one_hot(node: Node) -> _Form:
    x, own = _read(node)
    labels = list(range(len(own)))
    return _Form({x: _labelled(own, labels)}, (_labelled(_result(node), [*labels, None]),))


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


def _group_norm(node: Node) -> _Form:
    x, own = _read(node)
    labels = [0, *[None] * (len(own) - 1)]
    args = {arg: _whole(shape_of(arg) or ()) for arg in _tensors(node)} | {x: _labelled(own, labels)}
    return _Form(args, (_labelled(own, labels),))


def _batch_norm(node: Node) -> _Form | None:
    """Channels go together; in training they are all that can be split, unless statistics are written."""
    (x, own), training = _read(node), bool(node.args[5])
    if training and isinstance(node.args[3], Node):
        return None
    labels = [None if training and d != 1 else d for d in range(len(own))]
    args = {arg: _labelled(shape_of(arg) or (), [1]) for arg in _tensors(node) if arg is not x}
    return _Form({**args, x: _labelled(own, labels)}, (_labelled(own, labels),))


def _attention(node: Node) -> _Form | None:
    """Q (..., L, E), k (..., S, E), v (..., S, V): batch and heads go together, grouped ones with that they share."""
    q, k, v = node.args[:3]
    shape, mask = _result(node), _argument(node, 3, node.kwargs.get("attn_mask"))
    lead, tensors = shape[:-2], [n for n in (q, k, v, mask) if isinstance(n, Node)]
    args = {n: _aligned((shape_of(n) or ())[:-2], lead) + _whole((shape_of(n) or ())[-2:]) for n in tensors}
    results = _labelled(shape, [*range(len(lead)), None, None])
    if node.kwargs.get("enable_gqa"):
        heads, kept = (shape_of(k) or ())[-3], len(lead) - 1  # type: ignore[arg-type]
        if isinstance(mask, Node) or q in (k, v) or heads != (shape_of(v) or ())[-3] or not isinstance(heads, int):  # type: ignore[arg-type]
            return None
        shared, grouped = ((kept, heads),), ((kept, heads), (None, lead[-1] // heads))
        by_head = {q: grouped, k: shared, v: shared}
        args = {n: (*dims[:-3], by_head[n], *dims[-2:]) for n, dims in args.items()}
        results = (*results[:-3], grouped, *results[-2:])
    return _Form(args, (results,))


def _reduced(node: Node, *, at: int = 1) -> _Form:
    """A reduction of the dimensions that an argument lists, or of all of them; only a sum can be added up."""
    x, own = _read(node)
    dims = _dims(_argument(node, at), len(own))
    summed = node.target in (aten.sum.default, aten.sum.dim_IntList)
    labels = [d if d not in dims or summed else None for d in range(len(own))]
    groups = (frozenset([x]),) if summed or node.target in (aten.mean.default, aten.mean.dim) else ()
    results = []
    for shape in _shapes(node):
        kept = [None if d in dims else d for d in range(len(own)) if len(shape) == len(own) or d not in dims]
        results.append(_labelled(shape, kept))
    return _Form({x: _labelled(own, labels)}, tuple(results), groups)


def _label_loss(node: Node) -> _Form | None:
    """X (rows, classes, ...) and labels or probabilities; a mean, which divides by the number of labels, is no sum."""
    (x, own), labels, reduction = _read(node), node.args[1], _argument(node, 3, _MEAN)
    if reduction == _MEAN or len(own) < 2 or labels is x or not isinstance(labels, Node):
        return None
    of_x = [None if d == 1 else d for d in range(len(own))]
    kept = [d for d in range(len(own)) if d != 1]
    given = shape_of(labels) or ()
    args = {arg: _whole(shape_of(arg) or ()) for arg in _tensors(node)} | {x: _labelled(own, of_x)}
    args[labels] = _labelled(given, of_x if len(given) == len(own) else kept)
    return _Form(args, (_labelled(_result(node), [] if reduction == _SUM else kept),))


def _pair_loss(node: Node, *, at: int = 2) -> _Form | None:
    """A pointwise loss, or its sum."""
    (_, own), reduction = _read(node), _argument(node, at, _MEAN)
    args = {arg: _aligned(shape_of(arg) or (), own) for arg in _tensors(node)}
    if reduction == _MEAN or any(len(dims) > len(own) for dims in args.values()):
        return None
    return _Form(args, (_labelled(_result(node), [] if reduction == _SUM else range(len(own))),))


_MEAN, _SUM = 1, 2
"""How a loss is reduced, in aten's numbers."""


def _dropout(node: Node) -> _Form:
    x, shape = _read(node)
    labels = _labelled(shape, range(len(shape)))
    return _Form({x: labels}, (labels,), (frozenset([x]),))


_RULES: dict[Any, Rule] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.einsum.default: _einsum,
    aten.conv1d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv3d.default: _convolution,
    aten.conv3d.padding: _convolution,
    aten.conv_transpose1d.default: partial(_convolution, transposed=True),
    aten.conv_transpose2d.input: partial(_convolution, transposed=True),
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
    aten.t.default: _t,
    aten.numpy_T.default: _t,
    aten.mT.default: _mt,
    aten.permute.default: _permute,
    aten.movedim.int: _movedim,
    aten.expand.default: _expand,
    aten.expand_as.default: _expand,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _along_dim,
    aten.select.int: _select,
    aten.unbind.int: _select,
    aten.softmax.int: partial(_along_dim, linear=False),
    aten._softmax.default: partial(_along_dim, linear=False),
    aten.log_softmax.int: partial(_along_dim, linear=False),
    aten._log_softmax.default: partial(_along_dim, linear=False),
    aten.glu.default: partial(_along_dim, linear=False),
    aten.cumsum.default: _along_dim,
    aten.cumprod.default: partial(_along_dim, linear=False),
    aten.flip.default: _along_dim,
    aten.roll.default: partial(_along_dim, at=2, default=()),
    aten.sort.default: partial(_along_dim, linear=False),
    aten.topk.default: partial(_along_dim, at=2, linear=False),
    aten.tril.default: partial(_along_last, last=2),
    aten.triu.default: partial(_along_last, last=2),
    aten.pad.default: _pad,
    aten.max_pool1d.default: partial(_along_last, last=1, linear=False),
    aten.max_pool2d.default: partial(_along_last, last=2, linear=False),
    aten.avg_pool1d.default: partial(_along_last, last=1),
    aten.avg_pool2d.default: partial(_along_last, last=2),
    aten.adaptive_avg_pool1d.default: partial(_along_last, last=1),
    aten.adaptive_avg_pool2d.default: partial(_along_last, last=2),
    aten.upsample_nearest2d.vec: partial(_along_last, last=2),
    aten.upsample_bilinear2d.vec: partial(_along_last, last=2),
    aten.split.Tensor: _split_sizes,
    aten.split_with_sizes.default: _split_sizes,
    aten.chunk.default: _split_sizes,
    operator.getitem: _getitem,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.one_hot.default: _one_hot,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _layer_norm,
    aten.group_norm.default: _group_norm,
    aten.batch_norm.default: _batch_norm,
    aten.scaled_dot_product_attention.default: _attention,
    keyed_attention: _attention,
    aten.sum.default: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.mean.default: _reduced,
    aten.amax.default: _reduced,
    aten.amin.default: _reduced,
    aten.max.dim: _reduced,
    aten.min.dim: _reduced,
    aten.argmax.default: _reduced,
    aten.any.dim: _reduced,
    aten.all.dim: _reduced,
    aten.var.dim: _reduced,
    aten.var.correction: _reduced,
    aten.std.dim: _reduced,
    aten.std.correction: _reduced,
    aten.prod.dim_int: _reduced,
    aten.logsumexp.default: _reduced,
    aten.linalg_vector_norm.default: partial(_reduced, at=2),
    aten.cross_entropy_loss.default: _label_loss,
    aten.nll_loss_nd.default: _label_loss,
    aten.mse_loss.default: _pair_loss,
    aten.l1_loss.default: _pair_loss,
    aten.smooth_l1_loss.default: _pair_loss,
    aten.binary_cross_entropy_with_logits.default: partial(_pair_loss, at=4),
    keyed_dropout: _dropout,
    aten.dropout.default: _dropout,
    aten.contiguous.default: _pointwise,
    aten.to.dtype: _pointwise,
    aten.to.dtype_layout: _pointwise,
    aten.to.device: _pointwise,
    aten._to_copy.default: _pointwise,
    aten.type_as.default: _as_type,
    aten.zeros_like.default: _pointwise,
    aten.ones_like.default: _pointwise,
    aten.full_like.default: _pointwise,
    aten.broadcast_tensors.default: _pointwise,
    aten.detach.default: _pointwise,
    aten.alias.default: _pointwise,
    aten.lift_fresh_copy.default: _pointwise,
    aten.__and__.Tensor: _pointwise,
    aten.__or__.Tensor: _pointwise,
    aten.where.ScalarOther: _pointwise,
    aten.where.ScalarSelf: _pointwise,
}
