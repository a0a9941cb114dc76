"""A forward, or a part of it, under an autocast of its own: a region of the graph, taken apart so that it can be cut.

Export keeps such a region as one operation. Here each operation that autocast may cast becomes a region of its own;
those that no device's autocast casts are taken out. Regions that write into tensors stay whole, and so do those that
switch an outer autocast off.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch.fx import GraphModule, Node

REGION: Any = torch.ops.higher_order.wrap_with_autocast
_SETTINGS, _ENABLED = 4, 2
"""Arguments before the region's graph: device type, dtype, whether enabled, whether casts of weights are kept."""

_NEUTRAL = {
    *("add", "sub", "rsub", "mul", "neg", "abs", "where", "masked_fill", "maximum", "minimum", "clamp", "clamp_min"),
    *("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "hardtanh", "hardswish", "mish", "relu6"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "bitwise_not", "arange"),
    *("dropout", "feature_dropout", "alpha_dropout", "native_dropout", "bernoulli", "rand_like", "randn_like"),
    *("embedding", "clone", "contiguous", "_to_copy", "to", "max_pool2d", "batch_norm", "flatten", "reshape"),
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty"),
    *("sym_size", "index_select", "gather", "argmax", "tril", "triu", "expand_as", "view_as"),
}
"""Operations that autocast casts on no device, besides views."""


def open_regions(module: GraphModule) -> None:
    """Take the regions of a graph apart, those within them too."""
    for node in [node for node in module.graph.nodes if node.target is REGION]:
        body = getattr(module, node.args[_SETTINGS].target)
        if node.args[_ENABLED] and not any(map(_writes, _all(body))):
            _open(module, node, body)
    module.graph.lint()
    module.recompile()


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _all(body: GraphModule) -> list[Node]:
    return [node for one in body.modules() if isinstance(one, GraphModule) for node in one.graph.nodes]


def _open(module: GraphModule, region: Node, body: GraphModule) -> None:
    """Put a region's operations in its place."""
    graph, settings = module.graph, region.args[:_SETTINGS]
    own: dict[Node, Any] = {}
    given = iter(region.args[_SETTINGS + 1 :])
    with graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                own[node] = next(given)
            elif node.op == "get_attr":
                own[node] = graph.get_attr(_kept(module, _attribute(body, node.target)))
            elif node.op == "output":
                results = torch.fx.node.map_arg(node.args[0], own.__getitem__)
            elif _is_cast(node):
                own[node] = _region_of(module, node, settings, own)
            else:
                own[node] = graph.node_copy(node, own.__getitem__)
    for user in list(region.users):  # all are getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    attribute = region.args[_SETTINGS]
    graph.erase_node(region)
    if isinstance(attribute, Node) and not attribute.users:
        graph.erase_node(attribute)


def _attribute(body: GraphModule, path: Any) -> Any:
    value: Any = body
    for name in str(path).split("."):
        value = getattr(value, name)
    return value


def _kept(module: GraphModule, value: Any) -> str:
    """A new attribute of the graph's owner that holds a value."""
    number = 0
    while hasattr(module, name := f"in_autocast_{number}"):
        number += 1
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)
    return name


def _is_cast(node: Node) -> bool:
    """Whether an operation may give something else under autocast, on some device."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is REGION  # another is arithmetic of sizes
    return not (target.is_view or target._schema.name.removeprefix("aten::") in _NEUTRAL)


def _region_of(module: GraphModule, node: Node, settings: Any, own: dict[Node, Any]) -> Node:
    """A region of one operation; returns its result in the graph."""
    inner, operands = torch.fx.Graph(), list(dict.fromkeys(node.all_input_nodes))
    places = {operand: inner.placeholder(operand.name) for operand in operands}
    for operand, place in places.items():
        place.meta = dict(operand.meta)
    call = inner.node_copy(node, places.__getitem__)
    value: Any = node.meta.get("val")
    several = isinstance(value, (tuple, list))
    results = [inner.call_function(operator.getitem, (call, i)) for i in range(len(value))] if several else [call]
    inner.output(tuple(results))
    region = module.graph.call_function(
        REGION,
        (*settings, module.graph.get_attr(_kept(module, GraphModule(module, inner))), *(own[one] for one in operands)),
    )
    region.meta = {**node.meta, "val": tuple(value) if several else (value,)}
    if several:
        return region
    result = module.graph.call_function(operator.getitem, (region, 0))
    result.meta = dict(node.meta)
    return result
