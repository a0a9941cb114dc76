"""The forms of operators that run along dimensions: softmax, pooling, normalisation, reductions, losses."""

from __future__ import annotations

from functools import partial
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
    tensors_of,
    unlabelled,
    whole_args,
)

aten = torch.ops.aten


def _along_listed(node: Node, *, at: int = 1, default: Any = -1, linear: bool = True) -> NodeForm:
    """An operation along the dimensions that an argument lists."""
    _, own = first_tensor(node)
    return along(node, *_dims(argument(node, at, default), len(own)), linear=linear)


def _softmax(node: Node) -> NodeForm:
    x, own = first_tensor(node)
    dim = dim_argument(node, 1, len(own))
    return along(node, dim, linear=False)._replace(over=(x, dim) if isinstance(own[dim], int) else None)


def _dims(given: Any, ndim: int) -> set[int]:
    """The dimensions that an argument of an operator lists; none means all of them."""
    listed = [given] if isinstance(given, int) else list(given or range(ndim))
    return {int(d) % ndim for d in listed} if ndim else set()


def _along_last(node: Node, *, last: int, linear: bool = True) -> NodeForm:
    """An operation along so many of the last dimensions."""
    return along(node, *range(-last, 0), linear=linear)


def _pad(node: Node) -> NodeForm:
    pairs: Any = node.args[1]
    padded = [-1 - i // 2 for i, width in enumerate(pairs) if width != 0]
    return along(node, *padded, linear=not argument(node, 3))


def _layer_norm(node: Node) -> NodeForm:
    normalized: Any = node.args[1]
    return _along_last(node, last=len(normalized), linear=False)


def _group_norm(node: Node) -> NodeForm:
    _, own = first_tensor(node)
    return along(node, *range(1, len(own)), linear=False)


def _batch_norm(node: Node) -> NodeForm | None:
    """Channels go together, and in training nothing else, or each row of an instance norm; None if it writes."""
    (x, own), training = first_tensor(node), bool(node.args[5])
    if training and isinstance(node.args[3], Node):
        return None
    whole = range(2, len(own)) if node.target is aten.instance_norm.default else others(len(own), 1) * training
    dims = numbered(own, *whole)
    args = {arg: labelled(arg_shape(arg), [1]) for arg in tensors_of(node) if arg is not x}
    return NodeForm({**args, x: dims}, (dims,))


def _reduced(node: Node, *, at: int = 1) -> NodeForm:
    """A reduction of the dimensions that an argument lists, or of all; sums and maxima are put together from parts."""
    x, own = first_tensor(node)
    dims = _dims(argument(node, at), len(own))
    summed = node.target in (aten.sum.default, aten.sum.dim_IntList)
    linear = summed or node.target in (aten.mean.default, aten.mean.dim)
    largest = node.target is aten.amax.default
    results = tuple(
        numbered(shape, *dims) if len(shape) == len(own) else labelled(shape, others(len(own), *dims))
        for shape in result_shapes(node)
    )
    args = {x: numbered(own, *(() if summed or largest else dims))}
    return NodeForm(args, results, (frozenset([x]),) if linear else (), reduction="max" if largest else "sum")


_MEAN, _SUM = 1, 2
"""How a loss is reduced, in aten's numbers."""


def _label_loss(node: Node) -> NodeForm | None:
    """X (rows, classes, ...) and labels or probabilities; a mean, which divides by the number of labels, is no sum."""
    (x, own), labels, reduction = first_tensor(node), node.args[1], argument(node, 3, _MEAN)
    if len(own) < 2 or labels is x or not isinstance(labels, Node):
        return None
    given, kept = arg_shape(labels), others(len(own), 1)
    one_each = node.target is aten.cross_entropy_loss.default and len(given) < len(own)
    over = (x, 1) if one_each and isinstance(own[1], int) else None
    if reduction == _MEAN:
        return NodeForm(whole_args(node), (unlabelled(result_shape(node)),), over=over)
    of_labels = numbered(given, 1) if len(given) == len(own) else labelled(given, kept)
    args = whole_args(node) | {x: numbered(own, 1), labels: of_labels}
    return NodeForm(args, (labelled(result_shape(node), [] if reduction == _SUM else kept),), over=over)


def _pair_loss(node: Node, *, at: int = 2) -> NodeForm | None:
    """A pointwise loss, or its sum."""
    (_, own), reduction = first_tensor(node), argument(node, at, _MEAN)
    args = {arg: aligned(arg_shape(arg), own) for arg in tensors_of(node)}
    if reduction == _MEAN or any(len(dims) > len(own) for dims in args.values()):
        return None
    return NodeForm(args, (labelled(result_shape(node), [] if reduction == _SUM else range(len(own))),))


REDUCTIONS: dict[Any, Rule] = {
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
    aten._log_softmax.default: _softmax,
    aten.glu.default: partial(_along_listed, linear=False),
    aten.cumsum.default: _along_listed,
    aten.cumprod.default: partial(_along_listed, linear=False),
    aten.flip.default: _along_listed,
    aten.roll.default: partial(_along_listed, at=2, default=()),
    aten.sort.default: partial(_along_listed, linear=False),
    aten.topk.default: partial(_along_listed, at=2, linear=False),
    aten.argsort.default: partial(_along_listed, linear=False),
    aten.cummax.default: partial(_along_listed, linear=False),
    aten.cummin.default: partial(_along_listed, linear=False),
    aten.tril.default: partial(_along_last, last=2),
    aten.triu.default: partial(_along_last, last=2),
    aten.pad.default: _pad,
    aten.max_pool1d.default: partial(_along_last, last=1, linear=False),
    aten.max_pool2d.default: partial(_along_last, last=2, linear=False),
    aten.avg_pool1d.default: partial(_along_last, last=1),
    aten.avg_pool2d.default: partial(_along_last, last=2),
    aten.adaptive_avg_pool1d.default: partial(_along_last, last=1),
    aten.adaptive_avg_pool2d.default: partial(_along_last, last=2),
    aten.max_pool3d.default: partial(_along_last, last=3, linear=False),
    aten.avg_pool3d.default: partial(_along_last, last=3),
    aten.adaptive_avg_pool3d.default: partial(_along_last, last=3),
    aten.adaptive_max_pool1d.default: partial(_along_last, last=1, linear=False),
    aten.adaptive_max_pool2d.default: partial(_along_last, last=2, linear=False),
    aten.adaptive_max_pool3d.default: partial(_along_last, last=3, linear=False),
    aten.upsample_nearest2d.vec: partial(_along_last, last=2),
    aten.upsample_bilinear2d.vec: partial(_along_last, last=2),
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _layer_norm,
    aten.group_norm.default: _group_norm,
    aten.batch_norm.default: _batch_norm,
    aten.instance_norm.default: _batch_norm,
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
    aten.var_mean.dim: _reduced,
    aten.var_mean.correction: _reduced,
    aten.std_mean.dim: _reduced,
    aten.std_mean.correction: _reduced,
    aten.argmin.default: _reduced,
    aten.median.dim: _reduced,
    aten.prod.dim_int: _reduced,
    aten.logsumexp.default: _reduced,
    aten.linalg_vector_norm.default: partial(_reduced, at=2),
    aten.cross_entropy_loss.default: _label_loss,
    aten.nll_loss_nd.default: _label_loss,
    aten.mse_loss.default: _pair_loss,
    aten.l1_loss.default: _pair_loss,
    aten.smooth_l1_loss.default: _pair_loss,
    aten.huber_loss.default: _pair_loss,
    aten.kl_div.default: _pair_loss,
    aten.binary_cross_entropy.default: partial(_pair_loss, at=3),
    aten.binary_cross_entropy_with_logits.default: partial(_pair_loss, at=4),
}
