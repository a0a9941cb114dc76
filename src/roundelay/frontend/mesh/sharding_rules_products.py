"""The forms of products: of matrices, by ``einsum``, convolutions, attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from roundelay.frontend.mesh.sharding_rules_base import (
    NodeForm,
    Rule,
    aligned,
    arg_shape,
    argument,
    labelled,
    numbered,
    result_shape,
    unlabelled,
    varying,
    whole_along,
    whole_args,
)
from roundelay.frontend.stages.keyed_rng import keyed_attention
from roundelay.ir.op_form import Dims

aten = torch.ops.aten


def _product(node: Node, x: Any, w: Any, bias: Any = None, *, transposed: bool = False) -> NodeForm | None:
    """X (..., m, k) times w (..., k, n) or as ``linear`` has it (n, k), one a vector perhaps; plus a bias."""
    if not isinstance(x, Node) or not isinstance(w, Node) or len({x, w, bias}) < 3:
        return None
    left, right, shape = arg_shape(x), arg_shape(w), result_shape(node)
    batch = len(shape) - (len(left) > 1) - (len(right) > 1)
    m, n, k = range(batch, batch + 3)
    kept = [*range(batch), *[m][: len(left) - 1], *[n][: len(right) - 1]]
    of_x = aligned(left[:-2], shape[:batch]) + labelled(left[-2:], [m, k][-len(left) :])
    of_w = aligned(right[:-2], shape[:batch]) + labelled(right[-2:], [n, k] if transposed else [k, n][: len(right)])
    added = {bias: aligned(arg_shape(bias), shape, kept)} if isinstance(bias, Node) else {}
    return _bilinear({x: of_x, w: of_w}, added, labelled(shape, kept))


def _bilinear(factors: Mapping[Node, Dims], added: Mapping[Node, Dims], result: Dims) -> NodeForm:
    """Linear in each of the factors, together with what is added."""
    groups = tuple(frozenset([factor, *added]) for factor in factors)
    return NodeForm({**factors, **added}, (result,), groups)


def _linear(node: Node) -> NodeForm | None:
    x, w = node.args[:2]
    if not isinstance(w, Node) or len(arg_shape(w)) != 2:
        return None
    return _product(node, x, w, argument(node, 2), transposed=True)


def _addmm(node: Node) -> NodeForm | None:
    bias, x, w = node.args[:3]
    return _product(node, x, w, bias)


def _matmul(node: Node) -> NodeForm | None:
    return _product(node, *node.args[:2])


def _grouped_product(node: Node) -> NodeForm | None:
    """X (rows, k) times one of w (experts, k, n) for each group of rows, which end where the third argument says."""
    x, w = node.args[:2]
    if not isinstance(x, Node) or not isinstance(w, Node) or len(arg_shape(x)) != 2 or len(arg_shape(w)) != 3:
        return None
    k, n = 0, 1
    args = whole_args(node) | {x: labelled(arg_shape(x), [None, k]), w: labelled(arg_shape(w), [None, k, n])}
    return NodeForm(args, (labelled(result_shape(node), [None, n]),), (frozenset([x]), frozenset([w])))


def _outer(node: Node) -> NodeForm | None:
    return _with_labels(node, list(node.args[:2]), [[0], [1]], [0, 1])


def _tensordot(node: Node) -> NodeForm | None:
    """The dimensions that two arguments list go together and are summed."""
    x, y, *listed = node.args
    if not isinstance(x, Node) or not isinstance(y, Node):
        return None
    ranks = len(arg_shape(x)), len(arg_shape(y))
    pairs = [(int(i) % ranks[0], int(j) % ranks[1]) for i, j in zip(*listed, strict=True)]
    of_y = [next((i for i, j in pairs if j == d), ranks[0] + d) for d in range(ranks[1])]
    kept = [label for label in (*range(ranks[0]), *of_y) if label not in {i for i, _ in pairs}]
    return _with_labels(node, [x, y], [[*range(ranks[0])], of_y], kept)


def _with_labels(node: Node, tensors: list[Any], terms: list[list[int]], result: list[int]) -> NodeForm | None:
    """Linear in each of several tensors; None where one occurs twice, or repeats a dimension of size 1."""
    if len(set(tensors)) < len(tensors):
        return None
    args = {x: labelled(arg_shape(x), term) for x, term in zip(tensors, terms, strict=True)}
    sizes = {factor for dims in args.values() for factors in dims for factor in factors}
    if len({label for label, _ in sizes}) < len(sizes):
        return None
    return NodeForm(args, (labelled(result_shape(node), result),), tuple(frozenset([x]) for x in args))


def _einsum(node: Node) -> NodeForm | None:
    """Every letter is a label."""
    equation, tensors = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or not all(len(set(term)) == len(term) for term in terms):
        return None
    return _with_labels(node, tensors, [list(map(ord, term)) for term in terms], list(map(ord, right)))


def _convolution(node: Node, *, transposed: bool = False) -> NodeForm | None:
    """X (rows, i, ...), w (o, i, ...), bias (o): like a product; with groups only rows are split."""
    x, w, bias = *node.args[:2], argument(node, 2)
    if not isinstance(x, Node) or not isinstance(w, Node) or len({x, w, bias}) < 3:
        return None
    own, weight = arg_shape(x), arg_shape(w)
    o, i = (1, 2) if argument(node, 6, 1) == 1 else (None, None)
    rows, space = [0][: len(own) - len(weight) + 1], [None] * (len(weight) - 2)
    of_x = labelled(own, [*rows, i, *space])
    of_w = labelled(weight, [i, o, *space] if transposed else [o, i, *space])
    added = {bias: labelled(arg_shape(bias), [o])} if isinstance(bias, Node) else {}
    return _bilinear({x: of_x, w: of_w}, added, labelled(result_shape(node), [*rows, o, *space]))


def _attention(node: Node) -> NodeForm | None:
    """Q (..., L, E), k (..., S, E), v (..., S, V): batch and heads go together."""
    shape = result_shape(node)
    shapes = {n: arg_shape(n) for n in (*node.args[:3], _mask(node)) if isinstance(n, Node)}
    args = {n: aligned(own[:-2], shape[:-2]) + unlabelled(own[-2:]) for n, own in shapes.items()}
    form = NodeForm(args, (numbered(shape, -2, -1),))
    if node.target is keyed_attention:  # a part's mask is that part of the whole's, whose sizes must be known
        form = whole_along(form, varying(shape))
    return _grouped(node, form) if node.kwargs.get("enable_gqa") else form


def _mask(node: Node) -> Any:
    return argument(node, 3, node.kwargs.get("attn_mask"))


def _grouped(node: Node, form: NodeForm) -> NodeForm | None:
    """The same where several heads of q, one after the other, share one of k and v: they go with it."""
    q, k, v = [n for n in node.args[:3] if isinstance(n, Node)]
    shape, heads = result_shape(node), arg_shape(k)[-3]
    if isinstance(_mask(node), Node) or q in (k, v) or heads != arg_shape(v)[-3] or not isinstance(heads, int):
        return None
    of_k = ((len(shape) - 3, heads),)
    of_q = (*of_k, (None, shape[-3] // heads))
    by_head = {q: of_q, k: of_k, v: of_k}
    args = {n: (*dims[:-3], by_head[n], *dims[-2:]) for n, dims in form.args.items()}
    (result,) = form.results
    return NodeForm(args, ((*result[:-3], of_q, *result[-2:]),))


PRODUCTS: dict[Any, Rule] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.addmv.default: _addmm,
    aten.outer.default: _outer,
    aten.tensordot.default: _tensordot,
    aten.einsum.default: _einsum,
    aten._grouped_mm.default: _grouped_product,
    "transformers.grouped_mm_fallback.default": _grouped_product,
    aten.conv1d.default: _convolution,
    aten.conv1d.padding: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv3d.default: _convolution,
    aten.conv3d.padding: _convolution,
    aten.conv_transpose1d.default: partial(_convolution, transposed=True),
    aten.conv_transpose3d.input: partial(_convolution, transposed=True),
    aten.conv_transpose2d.input: partial(_convolution, transposed=True),
    aten.scaled_dot_product_attention.default: _attention,
    keyed_attention: _attention,
}
