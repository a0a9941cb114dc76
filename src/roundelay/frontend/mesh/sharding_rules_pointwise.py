"""The forms of pointwise operators: each dimension is split alike in all tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from roundelay.frontend.mesh.sharding_rules_base import (
    NodeForm,
    Rule,
    aligned,
    along,
    arg_shape,
    first_tensor,
    numbered,
    result_shapes,
    shape_of,
    tensors_of,
    varying,
)
from roundelay.frontend.mesh.written_out_softmax import widened
from roundelay.frontend.stages.keyed_rng import keyed_dropout

aten = torch.ops.aten


def pointwise(node: Node) -> NodeForm:
    """Dimensions are aligned at the end; one of size 1 is repeated."""
    shapes = result_shapes(node)
    args = {arg: aligned(arg_shape(arg), shapes[0]) for arg in tensors_of(node)}
    return NodeForm(args, tuple(map(numbered, shapes)), _linear_groups(node))


def _as_type(node: Node) -> NodeForm:
    """The first argument alone counts: of another the type is read, which every part of it has."""
    form = along(node)
    return form._replace(args={first_tensor(node)[0]: form.results[0]}, linear=_linear_groups(node))


def _dropout(node: Node) -> NodeForm:
    """A part's mask is that part of the whole's, whose sizes must be known."""
    _, own = first_tensor(node)
    return along(node, *varying(own))


def _prelu(node: Node) -> NodeForm | None:
    """One slope for each channel, the second dimension, or one for all."""
    (x, own), slopes = first_tensor(node), node.args[1]
    if not isinstance(slopes, Node) or slopes is x or not own:
        return None
    return NodeForm(
        {x: numbered(own), slopes: aligned(arg_shape(slopes), own[:2], [*range(2)][: len(own)])}, (numbered(own),)
    )


_LINEAR_IN_FIRST = {
    aten.neg.default, aten.alias.default, aten.clone.default, aten.detach.default, aten.to.dtype, aten.to.dtype_layout,
    aten.to.device, aten._to_copy.default, aten.contiguous.default, aten.lift_fresh_copy.default,
    aten.type_as.default, widened,
}  # fmt: skip
_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor}
_PRODUCTS = {aten.mul.Tensor}
_QUOTIENTS = {aten.div.Tensor}


def _linear_groups(node: Node) -> tuple[frozenset[Node], ...]:
    """In which of its tensors a pointwise operation is linear."""
    tensors = [arg for arg in node.args if isinstance(arg, Node) and shape_of(arg) is not None]
    if node.target in _LINEAR_IN_FIRST and tensors:
        return (frozenset(tensors[:1]),)
    if node.target is aten.broadcast_tensors.default:
        return (frozenset(tensors_of(node)),)
    if node.target is aten.masked_fill.Scalar and node.args[2] == 0:
        return (frozenset(tensors[:1]),)
    if node.target in _SUMS and len(tensors) == 2:
        return (frozenset(tensors),)
    if node.target in _PRODUCTS and len(set(tensors)) == len(tensors):
        return tuple([frozenset([tensor]) for tensor in tensors])
    if node.target in _QUOTIENTS and tensors and tensors[0] is node.args[0] and tensors[0] not in tensors[1:]:
        return (frozenset(tensors[:1]),)
    return ()


POINTWISE: dict[Any, Rule] = {
    keyed_dropout: _dropout,
    aten.dropout.default: along,
    widened: pointwise,
    aten.contiguous.default: pointwise,
    aten.to.dtype: pointwise,
    aten.to.dtype_layout: pointwise,
    aten.to.device: pointwise,
    aten._to_copy.default: pointwise,
    aten.type_as.default: _as_type,
    aten.zeros_like.default: pointwise,
    aten.ones_like.default: pointwise,
    aten.full_like.default: pointwise,
    aten.broadcast_tensors.default: pointwise,
    aten.detach.default: pointwise,
    aten.alias.default: pointwise,
    aten.lift_fresh_copy.default: pointwise,
    aten.__and__.Tensor: pointwise,
    aten.__or__.Tensor: pointwise,
    aten.rsub.Tensor: pointwise,
    aten.floor_divide.default: pointwise,
    aten.hardswish.default: pointwise,
    aten.log_sigmoid.default: pointwise,
    aten.prelu.default: _prelu,
    aten.where.ScalarOther: pointwise,
    aten.where.ScalarSelf: pointwise,
}
"""The rules of those that aten does not tag as pointwise."""
