"""Make an exported graph fit to be cut anywhere.

Three things stand in the way of cutting, and are taken out here:

- *In-place operations.* At a cut a tensor becomes a leaf, and autograd forbids writing into leaves. An in-place
  operation becomes its out-of-place twin when nothing else sees the storage it writes; otherwise it stays, and no cut
  may fall between the storage's birth and the last write (:attr:`Cleaned.uncuttable`).
- *Assertions on metadata*, which hold by construction and cost a call each.
- *Random operations*, which are replaced by the keyed ones of :mod:`roundelay.frontend.draws`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from roundelay.errors import CaptureError
from roundelay.frontend.draws import Draw, keyed_attention, keyed_call, keyed_dropout
from roundelay.frontend.export import Exported

aten = torch.ops.aten

_ASSERTIONS = (
    "aten._assert_tensor_metadata",
    "aten._assert_scalar",
    "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size",
    "aten._assert_async",
)
DRAW = "draw"


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What rewriting found out.

    Args:
        mutated: names of buffers that a forward changes.
        uncuttable: (first, last) pairs of node names: no cut at or after the first and before the last.
    """

    mutated: frozenset[str]
    uncuttable: tuple[tuple[str, str], ...]


def run_nodes(
    exported: Exported, tensors: Sequence[torch.Tensor], watch: Callable[[Node, Any], None], *, fresh: bool = True
) -> dict[str, Any]:
    """Run the graph node by node on real tensors; returns every node's value, placeholders included.

    Args:
        exported: the model.
        tensors: the call's tensors.
        watch: called after each operation with the node and its value.
        fresh: run on copies of the buffers, so that the model is left as it was.
    """
    env: dict[Node, Any] = {}
    for node in exported.module.graph.nodes:
        if node.op == "placeholder":
            role = exported.roles.get(node.name)
            if role is None:
                env[node] = Draw(0, 0)
            elif role.kind == "input":
                env[node] = tensors[int(role.name)]
            else:
                copy = fresh and role.kind != "parameter" and role.tensor is not None
                env[node] = role.tensor.clone() if copy and role.tensor is not None else role.tensor
        elif node.op == "get_attr":
            env[node] = getattr(exported.module, str(node.target))
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
            watch(node, env[node])
    return {node.name: value for node, value in env.items()}


def clean(exported: Exported, tensors: Sequence[torch.Tensor]) -> Cleaned:
    """Rewrite the graph in place; see the module's docstring.

    Raises:
        CaptureError: the forward writes into a parameter.
    """
    graph = exported.module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target).startswith(_ASSERTIONS):
            graph.erase_node(node)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = {name: _copy(role.tensor) for name, role in exported.roles.items() if role.kind == "buffer"}
        values = run_nodes(exported, [tensor.clone() for tensor in tensors], lambda node, value: None)
    mutated = frozenset(
        role.name
        for name, role in exported.roles.items()
        if role.kind == "buffer" and (not _same(before[name], values[name]) or _written(graph, name))
    )
    uncuttable = _writes_out_of_place(exported, values)
    return Cleaned(mutated, (*uncuttable, *_buffer_spans(exported, values, mutated)))


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and torch.equal(a, b)


def _written(graph: torch.fx.Graph, placeholder: str) -> bool:
    """Whether an operation whose signature says so writes into this placeholder."""
    node = next(n for n in graph.nodes if n.name == placeholder)
    return any(_target_of_write(user) is node for user in node.users)


def _target_of_write(node: Node) -> Node | None:
    """The argument that an in-place operation writes into, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node):
            return value
    return None


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() == 0:
        return None
    return value.untyped_storage().data_ptr()


def _writes_out_of_place(exported: Exported, values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Replace in-place operations by their twins where that is sound; return the spans where it is not."""
    graph = exported.module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    families: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for value in values.get(node.name, ()) if _is_tuple(values.get(node.name)) else [values.get(node.name)]:
            storage = _storage(value)
            if storage is not None:
                families.setdefault(storage, []).append(node)
    spans: dict[int, tuple[Node, Node]] = {}
    for node in [n for n in graph.nodes if _target_of_write(n) is not None]:
        written = _target_of_write(node)
        storage = _storage(values.get(node.name))
        if written is None or storage is None:
            continue
        family = [member for member in families[storage] if member is not node]
        kinds = {exported.roles[m.name].kind for m in family if m.name in exported.roles}
        if "parameter" in kinds:
            raise _writes_parameter(node)
        if "buffer" in kinds:
            continue
        seen_later = [m for m in family if m is not written and any(order[user] > order[node] for user in m.users)]
        twin = _twin(node)
        if twin is not None and not seen_later:
            node.target = twin
            for user in [user for user in written.users if order[user] > order[node]]:
                user.replace_input_with(written, node)
            continue
        first = min(family, key=lambda member: order[member])
        spans[storage] = (spans.get(storage, (first, node))[0], node)
    return tuple((first.name, last.name) for first, last in _unalias_inputs(exported, spans))


def _is_tuple(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _unalias_inputs(exported: Exported, spans: dict[int, tuple[Node, Node]]) -> list[tuple[Node, Node]]:
    """Writes into the call's own tensors go to a copy, so that a second forward finds them unchanged."""
    graph = exported.module.graph
    result = []
    for first, last in spans.values():
        if first.op != "placeholder":
            result.append((first, last))
            continue
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            copy = graph.call_function(aten.clone.default, (first,))
        copy.meta = dict(first.meta)
        for user in [user for user in first.users if user is not copy]:
            user.replace_input_with(first, copy)
        result.append((copy, last))
    return result


def _twin(node: Node) -> Any:
    """The out-of-place operator of an in-place one, or None."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = getattr(packet, target._overloadname or "default", None)
    if overload is None or len(overload._schema.arguments) != len(target._schema.arguments):
        return None
    if name == "copy_":  # autograd has no formula for the twin
        return None
    return overload


def _writes_parameter(node: Node) -> CaptureError:
    return CaptureError(
        f"operation {node.name!r} ({node.target}) of the model's forward",
        got="a write into a parameter",
        expected="parameters that only the optimizer changes",
        remedy="Compute a new tensor instead, or make the tensor a buffer.",
    )


def _buffer_spans(exported: Exported, values: dict[str, Any], mutated: frozenset[str]) -> list[tuple[str, str]]:
    """A buffer that changes must be read and written in one place, through whatever name its storage goes by."""
    nodes = list(exported.module.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    writes: dict[int | None, list[Node]] = {}
    for node in nodes:
        if _target_of_write(node) is not None:
            writes.setdefault(_storage(values.get(node.name)), []).append(node)
    spans = []
    for node in nodes:
        role = exported.roles.get(node.name)
        if role is not None and role.kind == "buffer" and role.name in mutated:
            users = sorted([*node.users, *writes.get(_storage(values[node.name]), [])], key=lambda user: order[user])
            spans.append((users[0].name, users[-1].name))
    return spans


def prune(exported: Exported, outputs: Sequence[Node], keep: frozenset[Node]) -> None:
    """Make ``outputs`` the graph's results and drop every operation that nothing needs and that writes nothing."""
    graph = exported.module.graph
    graph.output_node().args = (tuple(outputs),)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and node not in keep:
            if node.op == "call_function" and _has_effect(exported, node):
                continue
            graph.erase_node(node)


def _has_effect(exported: Exported, node: Node) -> bool:
    if _target_of_write(node) is not None:
        return True
    reads = [exported.roles[n.name] for n in node.all_input_nodes if n.name in exported.roles]
    return "batch_norm" in str(node.target) and any(role.kind == "buffer" for role in reads)


def key_draws(exported: Exported) -> dict[str, int]:
    """Replace random operations by keyed ones; returns operation name to its position among them."""
    graph = exported.module.graph
    random = [node for node in graph.nodes if node.op == "call_function" and _is_random(exported, node)]
    if not random:
        return {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        draw = graph.placeholder(DRAW)
    for position, node in enumerate(random):
        key = {DRAW: draw, "position": position}
        if node.target is aten.dropout.default:
            node.target, node.kwargs = keyed_dropout, {**node.kwargs, **key}
        elif node.target is aten.scaled_dot_product_attention.default:
            node.target, node.kwargs = keyed_attention, {**node.kwargs, **key}
        else:
            node.args, node.kwargs, node.target = (node.target, *node.args), {**node.kwargs, **key}, keyed_call
    return {node.name: position for position, node in enumerate(random)}


def _is_random(exported: Exported, node: Node) -> bool:
    target: Any = node.target
    if target is aten.scaled_dot_product_attention.default:
        return float(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) > 0.0  # type: ignore[arg-type]
    if isinstance(target, torch._ops.HigherOrderOperator):
        graphs = [getattr(exported.module, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        return any(
            inner.op == "call_function" and _is_random(exported, inner)
            for module in graphs
            if isinstance(module, torch.fx.GraphModule)
            for inner in module.graph.nodes
        )
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    schema = {a.name: i for i, a in enumerate(target._schema.arguments)}
    given = {name: node.args[i] for name, i in schema.items() if i < len(node.args)} | dict(node.kwargs)
    return not (given.get("train") is False or given.get("dropout", given.get("p", 1.0)) == 0)
