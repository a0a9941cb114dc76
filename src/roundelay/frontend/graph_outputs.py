"""What a graph hands out, and what it leaves in buffers, as operations that can be cut apart.

- *Bare outputs.* A model may return a parameter, a buffer or a constant as it is; a loss may read one past the model.
  Each becomes an operation that hands it on, so that it is a value like others and its gradient comes back.
- *Replaced buffers.* The trace writes them at its very end (:mod:`roundelay.frontend.export_adapter`). The write moves
up to
  where its value is known, and readers get a copy made before: no cut need be given up for what lies between.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from roundelay.frontend.export import Exported

aten = torch.ops.aten

_COPIES = (aten.detach.default, aten.clone.default)


def hand_out(exported: Exported, weights: Sequence[str] = ()) -> list[Node]:
    """Make every bare output an operation, and weights that a loss reads past the model further outputs.

    Args:
        exported: the model; its graph is changed.
        weights: names of parameters and buffers, each of which becomes an output behind the others.

    Returns:
        The nodes that the graph hands out now.
    """
    graph = exported.module.graph
    kinds = ("parameter", "buffer")
    places = {role.name: name for name, role in reversed(exported.roles.items()) if role.kind in kinds}
    nodes = {node.name: node for node in graph.nodes}
    outputs = [*graph.output_node().args[0], *(nodes[places[name]] for name in weights)]  # type: ignore[misc]
    made: dict[Node, Node] = {}
    for node in outputs:
        if node not in made and _is_bare(exported, node):
            made[node] = _handed_on(graph, node, last=exported.roles[node.name].kind != "buffer")
    results = [made.get(node, node) for node in outputs]
    graph.output_node().args = (tuple(results),)
    return results


def _is_bare(exported: Exported, node: Node) -> bool:
    role = exported.roles.get(node.name)
    return node.op == "placeholder" and role is not None and role.kind != "input"


def _handed_on(graph: torch.fx.Graph, node: Node, *, last: bool) -> Node:
    """An operation that makes the same value: at the end of the graph, or behind the last that uses a buffer."""
    users = [other for other in graph.nodes if other in node.users and other.op != "output"]
    behind = users[-1] if users and not last else graph.output_node().prev
    with graph.inserting_after(behind):
        made = graph.call_function(aten.alias.default, (node,))
    made.meta = {"val": node.meta.get("val")}
    return made


def read_with_writes(exported: Exported, mutated: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """For each buffer that is handed out and that the forward changes, all that uses it: no cut may part them."""
    outputs: Any = exported.module.graph.output_node().args[0]
    buffers = [node.args[0] for node in outputs if node.target is aten.alias.default]
    roles = [(node, exported.roles.get(node.name)) for node in buffers if isinstance(node, Node)]
    return tuple(
        tuple(other.name for other in exported.module.graph.nodes if other in node.users)
        for node, role in roles
        if role is not None and role.kind == "buffer" and role.name in mutated
    )


def settle_buffers(exported: Exported) -> None:
    """Write replaced buffers where their new value is known, and let what reads the old one read a copy."""
    graph = exported.module.graph
    if not exported.seen.replaced:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "placeholder" and (role := exported.roles.get(node.name)) is not None and role.kind == "buffer":
            writes = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
            if writes and not writes[-1].users:
                _settle(graph, node, writes[-1], order)
    graph.lint()


def _settle(graph: torch.fx.Graph, buffer: Node, write: Node, order: dict[Node, int]) -> None:
    readers = sorted((user for user in buffer.users if user is not write), key=order.__getitem__)
    if readers:
        with graph.inserting_before(readers[0]):
            old = graph.call_function(aten.clone.default, (buffer,))
        old.meta = {key: value for key, value in buffer.meta.items() if key == "val"}
        for reader in readers:
            reader.replace_input_with(buffer, old)
    chain, value = [write], write.args[1]
    while (
        isinstance(value, Node) and value.target in (aten.detach.default, aten.clone.default) and len(value.users) == 1
    ):
        chain.insert(0, value)
        value = value.args[0]
    if not isinstance(value, Node) or value.op == "placeholder":
        return
    behind = max((value, *(user for user in value.users if _writes(user))), key=lambda node: order.get(node, -1))
    for node in chain:
        if order[node] > order[behind]:
            behind.append(node)
        behind = node


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
