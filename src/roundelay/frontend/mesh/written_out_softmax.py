"""Softmax and cross entropy as a maximum, a sum and what is pointwise, for classes that are split over a mesh.

Each worker takes the largest score and the sum of exponentials of its own classes; the exchanges between them carry one
number per row each, in place of all scores (OneFlow, Sect. 6.3.1; Megatron-LM, Sect. 3)::

    m = max_c x_c        s = sum_c exp(x_c - m)        softmax_c = exp(x_c - m) / s
    cross entropy of label y:  log(s) - (x_y - m)

No gradient flows through m, on which no result depends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from roundelay.frontend.export.export import Exported

aten = torch.ops.aten

_NONE, _MEAN = 0, 1
"""Not reduced, and the mean, in aten's numbers of reductions; the sum is 2."""


def written_out(exported: Exported, names: Collection[str]) -> Exported:
    """The graph with these operations, each of :data:`WRITTEN_OUT`, written out; the results keep their names.

    Args:
        exported: the model.
        names: of operations.
    """
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    for node in exported.module.graph.nodes:
        if node.name in names:
            steps = _Steps(graph, node)
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: copied[n])
            copied[node] = WRITTEN_OUT[node.target](steps, *arguments[0], **arguments[1])
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    return replace(exported, module=torch.fx.GraphModule(exported.module, graph))


class _Steps:
    """Adds the operations in place of a node; every one has the node's module and source."""

    def __init__(self, graph: torch.fx.Graph, node: Node) -> None:
        self._graph, self._node = graph, node

    def __call__(self, target: Callable[..., Any], *args: Any) -> Node:
        return self._add(f"{self._node.name}_{getattr(target, '__name__', '').split('.')[0]}", target, args)

    def result(self, value: Node) -> Node:
        """Add the last operation: the value in the dtype of the node's result, with the node's name."""
        return self._add(self._node.name, aten.to.dtype, (value, self._node.meta["val"].dtype))

    def _add(self, name: str, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        made = self._graph.create_node("call_function", target, args, {}, name)
        value = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        made.meta = dict(self._node.meta) | {"val": value}
        return made


def widened(x: torch.Tensor) -> torch.Tensor:
    """In at least float32, in which torch's own softmax computes inside."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _shifted(add: _Steps, x: Node, dim: int) -> tuple[Node, Node, Node]:
    """``x - m``, its exponential, and ``s`` with a dimension of size 1."""
    wide = add(widened, x)
    largest = add(aten.amax.default, add(aten.detach.default, wide), [dim], True)
    shifted = add(aten.sub.Tensor, wide, largest)
    exponential = add(aten.exp.default, shifted)
    return shifted, exponential, add(aten.sum.dim_IntList, exponential, [dim], True)


def _softmax(add: _Steps, x: Node, dim: int, dtype: torch.dtype | None = None, *, log: bool) -> Node:
    if dtype is not None:
        x = add(aten.to.dtype, x, dtype)
    shifted, exponential, total = _shifted(add, x, dim)
    if log:
        result = add(aten.sub.Tensor, shifted, add(aten.log.default, total))
    else:
        result = add(aten.div.Tensor, exponential, total)
    return add.result(result)


def _cross_entropy(
    add: _Steps,
    x: Node,
    target: Node,
    weight: Node | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Node:
    """With a mean, the sum over all labels that count, divided by their number, or by the sum of their weights."""
    shifted, _, total = _shifted(add, x, 1)
    log_total = add(aten.log.default, total)
    ignored = add(aten.eq.Scalar, target, ignore_index)
    labels = add(aten.masked_fill.Scalar, target, ignored, 0)
    scores = add(aten.gather.default, shifted, 1, add(aten.unsqueeze.default, labels, 1))
    loss = add(aten.squeeze.dims, add(aten.sub.Tensor, log_total, scores), [1])
    weights = None if weight is None else add(aten.index.Tensor, weight, [labels])
    if weights is not None:
        loss = add(aten.mul.Tensor, loss, weights)
    if label_smoothing:
        smooth = _smooth(add, shifted, log_total, weight)
        loss = add(aten.add.Tensor, add(aten.mul.Tensor, loss, 1 - label_smoothing), smooth(label_smoothing))
    loss = add(aten.masked_fill.Scalar, loss, ignored, 0)
    if reduction == _NONE:
        return add.result(loss)
    summed = add(aten.sum.default, loss)
    if reduction != _MEAN:
        return add.result(summed)
    counted = add(aten.logical_not.default, ignored)
    if weights is not None:
        counted = add(aten.mul.Tensor, weights, counted)
    return add.result(add(aten.div.Tensor, summed, add(aten.sum.default, counted)))


def _smooth(add: _Steps, shifted: Node, log_total: Node, weight: Node | None) -> Callable[[float], Node]:
    """For a share of smoothing, what every row adds to its loss: the mean over all classes as its label."""
    classes = shifted.meta["val"].shape[1]
    of_all: Any = classes
    if weight is not None:
        shape = [1, -1] + [1] * (shifted.meta["val"].ndim - 2)
        shifted = add(aten.mul.Tensor, shifted, add(aten.view.default, weight, shape))
        of_all = add(aten.sum.default, weight)
    scores = add(aten.sum.dim_IntList, shifted, [1])
    every = add(aten.sub.Tensor, add(aten.mul.Tensor, add(aten.squeeze.dims, log_total, [1]), of_all), scores)
    return lambda share: add(aten.mul.Tensor, every, share / classes)


WRITTEN_OUT: Mapping[Any, Callable[..., Node]] = {
    aten.softmax.int: partial(_softmax, log=False),
    aten.log_softmax.int: partial(_softmax, log=True),
    aten.cross_entropy_loss.default: _cross_entropy,
}
"""The operators that can be written out."""
