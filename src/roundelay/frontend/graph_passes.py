"""Passes that make an exported graph cuttable anywhere.

They remove three obstacles:

- *In-place operations.* At a cut a tensor becomes a leaf, and autograd forbids writing into leaves. An in-place
  operation is replaced by its out-of-place counterpart if nothing else reads the storage it writes; otherwise it stays,
  and no cut is allowed between the storage's creation and its last write (:attr:`Cleaned.uncuttable`). A write is
  recognised by the operator's schema, or by the version counter of a tensor: so also within ``torch.no_grad()``, which
  export turns into one operation.
- *Assertions on metadata*, which hold by construction and cost a call each.
- *Random operations*, which are replaced by the keyed ones of :mod:`roundelay.frontend.stages.keyed_rng`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from roundelay.errors import CaptureError
from roundelay.frontend.export.export import Exported, Role
from roundelay.frontend.export.export_substitutes import branch, cumulative_batch_norm, takes_statistics
from roundelay.frontend.graph_run import (
    DRAW,
    Call,
    Writes,
    call_node,
    declared_writes,
    is_mutable,
    run_nodes,
    version_of,
)
from roundelay.frontend.stages.keyed_rng import keyed_attention, keyed_call, keyed_dropout

aten = torch.ops.aten

_ASSERTIONS = (
    "aten._assert_tensor_metadata",
    "aten._assert_scalar",
    "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size",
    "aten._assert_async",
)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What :func:`clean` has found in a graph.

    Args:
        mutated: names of buffers that a forward changes.
        uncuttable: groups of node names: no cut between the first and the last of them that pruning leaves.
        writers: names of the operations that write into a tensor, buffers included.
        inputs: indices of the tensors of the model's call that a forward writes into.
    """

    mutated: frozenset[str]
    uncuttable: tuple[tuple[str, ...], ...]
    writers: frozenset[str]
    inputs: frozenset[int]


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What a run of the graph as exported shows.

    Args:
        storages: for each node the storages of its tensors; numbers that name a storage also after it was freed.
        sizes: for each node the sizes of its tensors; None if it is or has anything else.
        writes: for each operation that writes, the nodes written into.
        mutated: names of buffers that a forward changes.
    """

    storages: dict[str, tuple[int | None, ...]]
    sizes: dict[str, list[torch.Size] | None]
    writes: Writes
    mutated: frozenset[str]

    def storage(self, node: Node) -> int | None:
        """The storage of a node that is a tensor; None if that is empty, or the node is several tensors."""
        parts = self.storages[node.name]
        return parts[0] if len(parts) == 1 else None

    @property
    def touched(self) -> set[int | None]:
        """The storages that operations write into."""
        return {self.storage(target) for targets in self.writes.values() for target in targets}


def first_run(exported: Exported, tensors: Sequence[torch.Tensor]) -> FirstRun:
    """Run the graph as exported, without gradients, and see what it writes; values are freed after their last use.

    Raises:
        StateWritten: the forward writes into a parameter.
    """
    known: dict[int, StorageWeakRef] = {}  # while a reference is there, no other storage is at its address
    storages: dict[str, tuple[int | None, ...]] = {}
    sizes: dict[str, list[torch.Size] | None] = {}
    refusing = _refusing_writes(exported)

    def note(name: str, value: Any) -> None:
        parts = value if isinstance(value, (tuple, list)) else [value]
        storages[name] = tuple(_numbered(part, known) for part in parts)
        sizes[name] = [part.shape for part in parts] if all(map(torch.is_tensor, parts)) else None

    def call(node: Node, args: Any, kwargs: Any) -> Any:
        value = refusing(node, args, kwargs)
        note(node.name, value)
        return value

    placeholders = [node.name for node in exported.module.graph.nodes if node.op != "call_function"]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        buffers = [(name, role.tensor) for name, role in exported.roles.items() if role.kind == "buffer"]
        before = {name: None if tensor is None else tensor.clone() for name, tensor in buffers}
        values, writes = run_nodes(exported, [tensor.clone() for tensor in tensors], call, keep=placeholders)
    for name, value in values.items():
        note(name, value)
    run = FirstRun(storages, sizes, writes, frozenset())
    written = run.touched | {number for name in _statistics(exported) for number in storages[name]}
    changed = (name for name, _ in buffers if not _same(before[name], values[name]) or storages[name][0] in written)
    return replace(run, mutated=frozenset(exported.roles[name].name for name in changed))


def _numbered(value: Any, known: dict[int, StorageWeakRef]) -> int | None:
    """The number of a tensor's storage, from a weak reference to it, which is kept."""
    if _storage(value) is None:
        return None
    reference = StorageWeakRef(value.untyped_storage())
    return known.setdefault(reference.cdata, reference).cdata  # type: ignore[no-any-return]


def clean(exported: Exported, run: FirstRun) -> Cleaned:
    """Rewrite the graph in place, as the module's docstring describes.

    Args:
        exported: the model.
        run: of its graph, after :func:`drop_assertions`.

    Raises:
        StateWritten: the forward writes into a tensor that is neither parameter nor buffer.
    """
    touched = run.touched
    inputs = frozenset(
        int(role.name)
        for name, role in exported.roles.items()
        if role.kind == "input" and run.storages[name][0] is not None and run.storages[name][0] in touched
    )
    spans = (*_writes_out_of_place(exported, run), *_buffer_spans(exported, run))
    return Cleaned(run.mutated, spans, frozenset(node.name for node in run.writes), inputs)


def drop_assertions(exported: Exported) -> None:
    """Remove assertions on metadata from the graph."""
    graph = exported.module.graph
    for node in list(graph.nodes):
        if is_assertion(node):
            graph.erase_node(node)


def is_assertion(node: Node) -> bool:
    """Whether a node only asserts something about sizes or dtypes."""
    return node.op == "call_function" and str(node.target).startswith(_ASSERTIONS)


def _statistics(exported: Exported) -> set[str]:
    """Names of the placeholders into which a BatchNorm writes statistics, which neither schema nor counter shows."""
    return {
        arg.name
        for node in exported.module.graph.nodes
        if node.op == "call_function" and takes_statistics(node.target, node.args) and _momentum(node) != 0
        for arg in node.args[3:5]
        if isinstance(arg, Node)
    }


def _momentum(node: Node) -> Any:
    return None if node.target is cumulative_batch_norm else node.args[6]


def _refusing_writes(exported: Exported) -> Call:
    """Return a function that calls an operation but refuses writes into parameters, which are the model's own."""
    nodes = {node.name: node for node in exported.module.graph.nodes}
    owned = [(_storage(role.tensor), nodes[name]) for name, role in exported.roles.items() if role.kind == "parameter"]
    parameters: dict[int | None, Node] = {storage: node for storage, node in owned if storage is not None}

    def call(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in tree_leaves(declared_writes(node.target, args, kwargs)):
            if _storage(value) in parameters:
                raise _writes_state(exported, [parameters[_storage(value)]])
        leaves = tree_leaves((args, kwargs))
        if not any(map(_writes_within, leaves)):
            return call_node(node, args, kwargs)
        copies = [(value, value.clone(), version_of(value)) for value in leaves if _storage(value) in parameters]
        try:
            return call_node(node, args, kwargs)
        finally:  # restore all of them before refusing
            changed = [(value, copy) for value, copy, version in copies if version_of(value) != version]
            for value, copy in changed:
                value.copy_(copy)
            if changed:
                raise _writes_state(exported, [parameters[_storage(changed[0][0])]])

    return call


def _writes_within(value: Any) -> bool:
    """Whether a value is a nested graph, such as that of a ``torch.no_grad()`` block, that contains writes."""
    parts = value.modules() if isinstance(value, torch.fx.GraphModule) else ()
    targets = [node.target for part in parts if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes]
    return any(map(is_mutable, targets))


def _same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    if a is None or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:  # which torch.equal cannot compare
        return torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(a, b)


def _storage(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if value.untyped_storage().nbytes() == 0:
        return None
    return value.untyped_storage().data_ptr()


def _writes_out_of_place(exported: Exported, run: FirstRun) -> list[tuple[str, ...]]:
    """Replace in-place operations by out-of-place ones where that is sound; return the spans where it is not.

    Operations that are replaced are removed from the run's writes.
    """
    writes = run.writes
    order = {node: i for i, node in enumerate(exported.module.graph.nodes)}
    aliases_of = _aliases(exported, run)
    spans: dict[int, list[Node]] = {}
    for node, written in [(node, target) for node, targets in list(writes.items()) for target in targets]:
        storage = run.storage(written)
        if storage is None:
            continue
        aliases = [member for member in aliases_of[storage] if member is not node]
        kinds = {exported.roles[m.name].kind for m in aliases if m.name in exported.roles}
        if kinds & {"parameter", "constant"}:
            raise _writes_state(exported, aliases)
        if "buffer" in kinds:
            continue
        others = [m for m in aliases if m is not written and order[m] < order[node]]
        seen_later = any(order[user] > order[node] for member in others for user in member.users)
        replacement = _out_of_place(node)
        if replacement is not None and node.args[0] is written and not seen_later:
            node.target = replacement
            del writes[node]
            for user in [user for user in written.users if order[user] > order[node]]:
                user.replace_input_with(written, node)
            continue
        spans[storage] = [*(m for m in aliases if order[m] < order[node]), node]
    return [tuple(node.name for node in span) for span in _unalias_inputs(exported, spans)]


def _aliases(exported: Exported, run: FirstRun) -> dict[int, list[Node]]:
    """Map every storage to the nodes whose values it holds, in order."""
    aliases_of: dict[int, list[Node]] = {}
    for node in exported.module.graph.nodes:
        for storage in set(run.storages.get(node.name, ())) - {None}:
            aliases_of.setdefault(storage, []).append(node)  # type: ignore[arg-type]
    return aliases_of


def _unalias_inputs(exported: Exported, spans: dict[int, list[Node]]) -> list[list[Node]]:
    """Redirect writes into the call's own tensors to a copy, so that a second forward reads them unchanged."""
    graph = exported.module.graph
    result = []
    for first, *rest in spans.values():
        if first.op != "placeholder":
            result.append([first, *rest])
            continue
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            copy = graph.call_function(aten.clone.default, (first,))
        copy.meta = dict(first.meta)
        for user in [user for user in first.users if user is not copy]:
            user.replace_input_with(first, copy)
        result.append([copy, *rest])
    return result


def _out_of_place(node: Node) -> Any:
    """The out-of-place counterpart of an in-place operator with a result of the same dtype, or None."""
    overload = counterpart(node)
    return overload if overload is not None and _keeps_dtype(node, overload) else None


def counterpart(node: Node) -> Any:
    """The out-of-place counterpart of an in-place operator, whose result may have a wider dtype, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = None if packet is None else _overload_like(packet, target)
    if overload is None:
        return None
    if name == "copy_":  # autograd has no formula for its counterpart
        return None
    return overload


def _keeps_dtype(node: Node, overload: Any) -> bool:
    """Whether the counterpart's result has the dtype of what is written into: it may be of a wider argument's."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    written = args[0] if args else None
    if not isinstance(written, torch.Tensor):
        return True
    try:
        result = overload(*args, **kwargs)
    except Exception:  # of an argument that is known only in a run
        return True
    return not isinstance(result, torch.Tensor) or result.dtype == written.dtype


def _overload_like(packet: Any, target: torch._ops.OpOverload) -> Any:
    """The operator of a packet with the same arguments: mostly of the same name, but ``pow_.Scalar`` has another."""
    types = [argument.type for argument in target._schema.arguments]
    same = getattr(packet, target._overloadname or "default", None)
    if same is not None and [argument.type for argument in same._schema.arguments] == types:
        return same
    others = [getattr(packet, name) for name in packet.overloads()]
    pointwise = [other for other in others if torch.Tag.pointwise in other.tags]
    return next((one for one in pointwise if [arg.type for arg in one._schema.arguments] == types), None)


class StateWritten(Exception):
    """Raised when the forward writes into a tensor of the model that is not a buffer.

    Args:
        role: of that tensor.
    """

    def __init__(self, role: Role) -> None:
        super().__init__(role.name)
        self.role = role


def _writes_state(exported: Exported, aliases: Sequence[Node]) -> StateWritten:
    return StateWritten(next(r for r in (exported.roles.get(member.name) for member in aliases) if r is not None))


def write_error(role: Role, line: str) -> CaptureError:
    """The error for a forward that writes into a tensor of the model.

    Args:
        role: of the tensor.
        line: the source line that writes, if it is known.
    """
    remedy = "Compute a new tensor instead, or make the tensor a buffer with register_buffer."
    if role.kind == "parameter" and role.tensor is not None and not role.tensor.requires_grad:
        remedy = (
            "Make frozen weights that the forward changes itself (a momentum encoder) buffers: for each module of it, "
            "for name, weight in list(module.named_parameters(recurse=False)): del module._parameters[name]; "
            "module.register_buffer(name, weight.detach()); and change its buffers() in the forward."
        )
    what = f"parameter {role.name!r}" if role.kind == "parameter" else f"tensor {role.name!r}, which is no buffer"
    return CaptureError(
        f"{what}, which the model's forward writes into{', ' + line if line else ''}",
        got="other values after a forward than before it",
        expected="parameters that only the optimizer changes, and buffers for all else that a forward changes",
        remedy=remedy,
    )


def _buffer_spans(exported: Exported, run: FirstRun) -> list[tuple[str, ...]]:
    """The spans of the mutated buffers: all that reads or writes one, under any alias, must stay in one segment."""
    order = {node: i for i, node in enumerate(exported.module.graph.nodes)}
    writers: dict[int | None, list[Node]] = {}
    for node, targets in run.writes.items():
        for target in targets:
            writers.setdefault(run.storage(target), []).append(node)
    spans = []
    for node in order:
        role = exported.roles.get(node.name)
        if role is not None and role.kind == "buffer" and role.name in run.mutated:
            users = sorted({*node.users, *writers.get(run.storage(node), [])}, key=lambda user: order[user])
            spans.append(tuple(user.name for user in users))
    return spans


def prune(exported: Exported, outputs: Sequence[Node], writers: frozenset[str]) -> None:
    """Make ``outputs`` the graph's results, and erase operations whose value is unused and that write nothing."""
    graph = exported.module.graph
    graph.output_node().args = (tuple(outputs),)
    for node in reversed(list(graph.nodes)):
        dead = node.op in ("call_function", "get_attr") and not node.users and node.name not in writers
        if dead and not _has_effect(exported, node):
            graph.erase_node(node)


def _has_effect(exported: Exported, node: Node) -> bool:
    """Whether an operation changes buffers although neither its schema nor version counters show it (BatchNorm)."""
    reads = [exported.roles[n.name] for n in node.all_input_nodes if n.name in exported.roles]
    return "batch_norm" in str(node.target) and any(role.kind == "buffer" for role in reads)


def key_draws(exported: Exported) -> dict[str, int]:
    """Replace random operations by keyed ones; return each one's name and position among them."""
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
    if target is branch or isinstance(target, torch._ops.HigherOrderOperator):
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
    passed = {name: node.args[i] for name, i in schema.items() if i < len(node.args)} | dict(node.kwargs)
    return not (passed.get("train") is False or passed.get("dropout", passed.get("p", 1.0)) == 0)
