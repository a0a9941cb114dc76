"""Run an exported graph node by node, and see what its operations write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from roundelay.frontend.export.export import Exported
from roundelay.frontend.stages.keyed_rng import RngKey

DRAW = "draw"
"""The placeholder of the key of random operations."""

Writes = dict[Node, tuple[Node, ...]]
Call = Callable[[Node, Any, Any], Any]


def call_node(node: Node, args: Any, kwargs: Any) -> Any:
    """Call a node's operation."""
    target: Any = node.target
    return target(*args, **kwargs)


def run_nodes(
    exported: Exported,
    tensors: Sequence[torch.Tensor],
    call: Call = call_node,
    keep: Collection[str] | None = None,
    weight: Callable[[torch.Tensor], torch.Tensor] = lambda own: own,
) -> tuple[dict[str, Any], Writes]:
    """Run the graph node by node, on copies of buffers and constants.

    Args:
        exported: the model.
        tensors: the call's tensors.
        call: runs an operation: node, args and kwargs -> its value.
        keep: names of the nodes whose values are returned; all others are freed after their last use. None: all.
        weight: what stands for one of the model's own tensors.

    Returns:
        The nodes' values by name, placeholders included; and for each operation that writes the nodes written into.
    """
    env: dict[Node, Any] = {}
    writes: Writes = {}
    unused = {} if keep is None else _last_uses(exported.module.graph, keep)
    for node in exported.module.graph.nodes:
        if node.op == "placeholder":
            env[node] = _placed(exported, node, tensors, weight)
        elif node.op == "get_attr":
            env[node] = getattr(exported.module, str(node.target))
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            before = {n: version_of(env[n]) for n in node.all_input_nodes}
            env[node] = call(node, args, kwargs)
            del args, kwargs
            declared = declared_writes(node.target, node.args, node.kwargs)
            written = tuple(n for n, version in before.items() if n in declared or version_of(env[n]) != version)
            writes |= {node: written} if written else {}
        for last in unused.get(node, ()):
            del env[last]
    return {node.name: value for node, value in env.items()}, writes


def _last_uses(graph: torch.fx.Graph, keep: Collection[str]) -> dict[Node, list[Node]]:
    """For each node those whose values nothing uses after it, without those to keep."""
    unused: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    for node in reversed(graph.nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen and node.op != "output":
                seen.add(value)
                if value.name not in keep:
                    unused.setdefault(node, []).append(value)
    return unused


def _placed(
    exported: Exported,
    node: Node,
    tensors: Sequence[torch.Tensor],
    weight: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """The value of a placeholder."""
    role = exported.roles.get(node.name)
    if role is None:
        return RngKey(0, 0)
    if role.kind == "input":
        return tensors[int(role.name)]
    return None if role.tensor is None else _weight(weight(role.tensor), copy=role.kind != "parameter")


def _weight(weight: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """The weight that a graph run uses: a copy, or the weight itself, detached where gradients are disabled."""
    if copy:
        return weight.clone()
    return weight if torch.is_grad_enabled() else weight.detach()


def is_mutable(target: Any) -> bool:
    """Whether it is an operator that writes into an argument according to its schema."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def declared_writes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes into according to its schema."""
    if not is_mutable(target):
        return []
    arguments = target._schema.arguments
    passed = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    return [value for a, value in passed if a.alias_info is not None and a.alias_info.is_write]


def version_of(value: Any) -> int:
    """How often a tensor has been written into; 0 for anything else."""
    return value._version if isinstance(value, torch.Tensor) else 0


def value_of(exported: Exported, tensors: Sequence[torch.Tensor], name: str, writers: Collection[str]) -> Any:
    """One node's value, by the operations that it depends on alone, without gradients.

    Args:
        exported: the model.
        tensors: the call's tensors.
        name: of the node.
        writers: names of the operations that write into a tensor, on which it may depend.
    """
    needed: set[Node] = set()
    for node in reversed(exported.module.graph.nodes):
        if node.name == name or node.name in writers or any(user in needed for user in node.users):
            needed.add(node)

    def call(node: Node, args: Any, kwargs: Any) -> Any:
        return call_node(node, args, kwargs) if node in needed else None

    with torch.no_grad():
        return run_nodes(exported, tensors, call, keep={name})[0][name]
