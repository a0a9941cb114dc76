"""Rewrite a graph's outputs and its writes to buffers so that they can be cut apart.

- *Bare outputs.* A model may return a parameter, a buffer or a constant unchanged; a loss may read one directly. Each
  becomes the output of an ``alias`` operation, so that it is a value like others and receives its gradient.
- *Replaced buffers.* The trace writes them at its very end (:mod:`roundelay.frontend.export.export_adapter`). The write
  is moved up to where its value is computed, and readers of the old value read a copy, so that cuts in between stay
  legal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from roundelay.frontend.export.export import Exported
from roundelay.frontend.graph_run import is_mutable

aten = torch.ops.aten

_COPIES = (aten.detach.default, aten.clone.default)


def wrap_outputs(exported: Exported, weights: Sequence[str] = ()) -> list[Node]:
    """Replace every bare output by an operation, and append weights that the loss reads directly to the outputs.

    Args:
        exported: the model; its graph is changed.
        weights: names of parameters and buffers to append to the outputs.

    Returns:
        The graph's new output nodes.
    """
    graph = exported.module.graph
    kinds = ("parameter", "buffer")
    placeholders = {role.name: name for name, role in reversed(exported.roles.items()) if role.kind in kinds}
    nodes = {node.name: node for node in graph.nodes}
    outputs = [*graph.output_node().args[0], *(nodes[placeholders[name]] for name in weights)]  # type: ignore[misc]
    aliases: dict[Node, Node] = {}
    for node in outputs:
        if node not in aliases and _is_bare(exported, node):
            aliases[node] = _aliased(graph, node, last=exported.roles[node.name].kind != "buffer")
    results = [aliases.get(node, node) for node in outputs]
    graph.output_node().args = (tuple(results),)
    return results


def _is_bare(exported: Exported, node: Node) -> bool:
    role = exported.roles.get(node.name)
    return node.op == "placeholder" and role is not None and role.kind != "input"


def _aliased(graph: torch.fx.Graph, node: Node, *, last: bool) -> Node:
    """Insert an ``alias`` of a value: at the end of the graph, or after the last user of a buffer."""
    users = [other for other in graph.nodes if other in node.users and other.op != "output"]
    after = users[-1] if users and not last else graph.output_node().prev
    with graph.inserting_after(after):
        alias = graph.call_function(aten.alias.default, (node,))
    alias.meta = {"val": node.meta.get("val")}
    return alias


def spans_of_output_buffers(exported: Exported, mutated: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """For each buffer that is an output and that the forward changes, its users: no cut may separate them."""
    outputs: Any = exported.module.graph.output_node().args[0]
    buffers = [node.args[0] for node in outputs if node.target is aten.alias.default]
    roles = [(node, exported.roles.get(node.name)) for node in buffers if isinstance(node, Node)]
    return tuple(
        tuple(other.name for other in exported.module.graph.nodes if other in node.users)
        for node, role in roles
        if role is not None and role.kind == "buffer" and role.name in mutated
    )


def move_buffer_writes_up(exported: Exported) -> None:
    """Move writes to replaced buffers to where the new value is computed; readers of the old value read a copy."""
    graph = exported.module.graph
    if not exported.seen.replaced:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "placeholder" and (role := exported.roles.get(node.name)) is not None and role.kind == "buffer":
            writes = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
            if writes and not writes[-1].users:
                _move_up(graph, node, writes[-1], order)
    graph.lint()


def _move_up(graph: torch.fx.Graph, buffer: Node, write: Node, order: dict[Node, int]) -> None:
    readers = sorted((user for user in buffer.users if user is not write), key=order.__getitem__)
    if readers:
        with graph.inserting_before(readers[0]):
            old = graph.call_function(aten.clone.default, (buffer,))
        old.meta = {key: value for key, value in buffer.meta.items() if key == "val"}
        for reader in readers:
            reader.replace_input_with(buffer, old)
    chain, value = [write], write.args[1]
    while isinstance(value, Node) and value.target in _COPIES and len(value.users) == 1:
        chain.insert(0, value)
        value = value.args[0]
    if not isinstance(value, Node) or value.op == "placeholder":
        return
    writers = (user for user in value.users if is_mutable(user.target))
    after = max((value, *writers), key=lambda node: order.get(node, -1))
    for node in chain:
        if order[node] > order[after]:
            after.append(node)
        after = node
