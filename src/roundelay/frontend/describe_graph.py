"""Run the exported graph on the sample micro-batch and describe it as plain data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

from roundelay.frontend.batch import fields
from roundelay.frontend.export.export import Exported
from roundelay.frontend.export.export_substitutes import takes_statistics
from roundelay.frontend.export.recurrent import FLOPS
from roundelay.frontend.few_rows import Rows
from roundelay.frontend.graph_passes import Cleaned
from roundelay.frontend.graph_run import DRAW, call_node, is_mutable, run_nodes, value_of
from roundelay.frontend.loss import LossReads
from roundelay.frontend.loss_metrics import value_names
from roundelay.ir.graph import BATCH, INPUT, Graph, Op, Parameter, Value, ValueKind

LIGHT_BYTES = 32 << 20
"""Where all values of a sample have fewer bytes, computing it takes less time than running it on fake tensors."""

_UNKNOWN_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""The module path that export gives to an operation whose module it does not know."""


def describe_graph(
    exported: Exported,
    cleaned: Cleaned,
    draws: dict[str, int],
    reads: LossReads,
    sample: tuple[Rows, Rows],
) -> Graph:
    """Build the logical graph.

    Args:
        exported: the rewritten model.
        cleaned: what rewriting has found.
        draws: operation name to position among the random operations.
        reads: what the loss reads.
        sample: the rows of the sample micro-batch on which operations compute, and all of them.
    """
    few, whole = sample
    tensors, own, rows = whole.tensors, fields(whole.batch), whole.count
    values, flops = _on_sample(exported, cleaned, few, whole)
    nodes = [node for node in exported.module.graph.nodes if node.op == "call_function"]
    values |= {INPUT + str(i): described(INPUT + str(i), tensor) for i, tensor in enumerate(tensors)}
    values |= {BATCH + path: described(BATCH + path, own[path]) for path in reads.batch}
    ops = tuple(_op(exported, node, flops[node.name], draws.get(node.name, -1)) for node in nodes)
    outputs = tuple(value_name(exported, node) for node in exported.module.graph.output_node().args[0])  # type: ignore[union-attr, arg-type]
    parameters, roles = _parameters(exported), exported.roles.values()
    return Graph(
        ops=ops,
        inputs=tuple(INPUT + str(i) for i in range(len(tensors))),
        batch=tuple(BATCH + path for path in reads.batch),
        outputs=outputs,
        values=values,
        parameters=parameters,
        buffers={r.name: 0 if r.tensor is None else r.tensor.nbytes for r in roles if r.kind == "buffer"},
        cuts=_legal_cuts(ops, outputs, values, _spans(exported, cleaned)),
        loss_counts=reads.counts,
        fingerprint=_fingerprint(exported, parameters, reads),
        sample_rows=rows,
        metrics=value_names(reads.metrics),
        min_rows=least_rows(exported.module),
        labels_per_row=_labels_per_row(exported, cleaned, reads, whole),
        one_row=on_one_row(exported.module, values, rows),
    )


_Described = tuple[dict[str, Value], dict[str, int]]
"""Every operation's value and FLOPs, by name."""


def _on_sample(exported: Exported, cleaned: Cleaned, few: Rows, whole: Rows) -> _Described:
    """Describe the operations on the whole sample: without computing it, if it is large.

    Then the operations run on fake tensors, which have sizes and no values; unless on few rows that gives anything else
    than real ones do, or an operation depends on values.
    """
    computed = _described(exported, cleaned, few.tensors)
    if few.whole:
        return computed
    num_bytes = sum(value.num_bytes for value in computed[0].values()) * whole.count / few.count
    if num_bytes > LIGHT_BYTES:
        try:
            if _described(exported, cleaned, few.tensors, FakeTensorMode(allow_non_fake_inputs=True)) == computed:
                return _described(exported, cleaned, whole.tensors, FakeTensorMode(allow_non_fake_inputs=True))
        except Exception:  # an operation that needs values
            pass
    return _described(exported, cleaned, whole.tensors)


def _described(
    exported: Exported, cleaned: Cleaned, tensors: Sequence[torch.Tensor], fake: FakeTensorMode | None = None
) -> _Described:
    """Run the graph once, on fake tensors if there is a mode for them, and describe what its operations compute."""
    values: dict[str, Value] = {}
    flops: dict[str, int] = {}

    def call(node: Node, args: Any, kwargs: Any) -> Any:
        before = counter.get_total_flops()
        value = call_node(node, args, kwargs)
        flops[node.name] = counter.get_total_flops() - before
        values[node.name] = described(node.name, value)
        return value

    own: Callable[[torch.Tensor], torch.Tensor] = (lambda tensor: tensor) if fake is None else fake.from_tensor
    written = set(chain.from_iterable(cleaned.uncuttable))
    with fake or nullcontext(), torch.enable_grad(), FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
        results, _ = run_nodes(exported, [own(tensor) for tensor in tensors], call, keep=written, weight=own)
    return values | {name: described(name, results[name]) for name in values.keys() & results.keys()}, flops


def _labels_per_row(exported: Exported, cleaned: Cleaned, reads: LossReads, whole: Rows) -> float:
    if reads.labels is None:
        return 0.0
    terms = reads.labels.terms
    if reads.labels.output >= 0:  # the model computes its loss; the last output counts the labels
        outputs: Any = exported.module.graph.output_node().args[0]
        terms = float(value_of(exported, whole.tensors, outputs[-1].name, cleaned.writers))
    return terms / whole.count or 1.0


def value_name(exported: Exported, node: Node) -> str:
    """The name under which a node's value travels."""
    role = exported.roles.get(node.name)
    return INPUT + role.name if role is not None and role.kind == "input" else node.name


def described(name: str, value: Any) -> Value:
    """A value of the graph as plain data."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        num_bytes = value.numel() * value.element_size()  # nbytes has no sparse tensors
        return Value(name, "tensor", tuple(value.shape), dtype, num_bytes, value.requires_grad)
    kind: ValueKind = "number" if type(value) in (int, float) else "other"
    return Value(name, kind, (), type(value).__name__, 0, False)


def _op(exported: Exported, node: Node, flops: int, draws: int) -> Op:
    roles = [(n, exported.roles.get(n.name)) for n in node.all_input_nodes if n.op != "get_attr" and n.name != DRAW]
    reads = [value_name(exported, n) for n, role in roles if role is None or role.kind == "input"]
    return Op(
        name=node.name,
        target=_target_name(node.target),
        module=_module_path(node),
        reads=tuple(dict.fromkeys(reads)),
        parameters=tuple(dict.fromkeys(r.name for _, r in roles if r is not None and r.kind == "parameter")),
        buffers=tuple(dict.fromkeys(r.name for _, r in roles if r is not None and r.kind == "buffer")),
        flops=flops,
        draws=draws,
    )


def _module_path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    if path == _UNKNOWN_MODULE:
        return ""
    return str(path).removeprefix("model").removeprefix(".")


def _parameters(exported: Exported) -> dict[str, Parameter]:
    return {
        r.name: Parameter(r.name, tuple(r.tensor.shape), r.tensor.nbytes, r.tensor.requires_grad, dtype_name(r.tensor))
        for r in exported.roles.values()
        if r.kind == "parameter" and r.tensor is not None
    }


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of a tensor's dtype, as plans have it."""
    return str(tensor.dtype).removeprefix("torch.")


def _spans(exported: Exported, cleaned: Cleaned) -> list[tuple[str, ...]]:
    """Groups between whose operations there is no cut; not those whose write makes a new value in this graph."""
    nodes = exported.module.graph.nodes
    pure = {n.name for n in nodes if isinstance(n.target, torch._ops.OpOverload) and not is_mutable(n.target)}
    anew = cleaned.writers & pure
    return [names for names in cleaned.uncuttable if names[-1] not in anew]


def _legal_cuts(
    ops: Sequence[Op], outputs: Sequence[str], values: dict[str, Value], spans: Sequence[Sequence[str]]
) -> tuple[int, ...]:
    """Positions where only tensors and numbers cross, and no storage is between its creation and its last write."""
    position = {op.name: i for i, op in enumerate(ops)}
    last_use = {name: len(ops) for name in outputs}
    for i, op in enumerate(ops):
        for name in op.reads:
            last_use[name] = max(last_use.get(name, -1), i)
    closed = [False] * len(ops)
    for name, value in values.items():
        if value.kind == "other" and name in last_use and name in position:
            closed[position[name] : last_use[name]] = [True] * (last_use[name] - position[name])
    for names in spans:
        positions = [position[name] for name in names if name in position]  # the others were pruned
        if positions:
            closed[min(positions) : max(positions)] = [True] * (max(positions) - min(positions))
    return tuple(i for i in range(len(ops) - 1) if not closed[i])


def _fingerprint(exported: Exported, parameters: dict[str, Parameter], reads: LossReads) -> str:
    """Digest of operations, parameters and what the loss reads; independent of the sample's sizes."""
    digest = hashlib.sha256()
    for line in _node_lines(exported.module):
        digest.update(line.encode())
    for parameter in parameters.values():
        digest.update(f"{parameter.name} {parameter.shape} {parameter.trainable}\n".encode())
    digest.update(f"{reads}".encode())
    return digest.hexdigest()[:24]


def _node_lines(module: torch.fx.GraphModule) -> Iterator[str]:
    """Yield a line for every node of a graph, and of the graphs that its operations run."""
    for node in module.graph.nodes:
        target = node.target if node.op != "call_function" else _target_name(node.target)
        args, kwargs = torch.fx.node.map_arg((node.args, dict(sorted(node.kwargs.items()))), lambda n: n.name)
        yield f"{node.op} {node.name} {target} {args} {kwargs}\n"
        inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, torch.fx.GraphModule):
            yield from _node_lines(inner)


def _target_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")


def least_rows(module: torch.fx.GraphModule) -> int:
    """The least number of rows of a micro-batch: two if a BatchNorm, at any depth, takes statistics over them."""
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    operations = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return 2 if any(takes_statistics(node.target, node.args) for node in operations) else 1


def on_one_row(module: torch.fx.GraphModule, values: Mapping[str, Value], rows: int) -> str:
    """Return torch's error message for training on a single row; empty if that is possible.

    Args:
        module: the graph.
        values: of its nodes by name, on a sample.
        rows: of the sample.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and takes_statistics(node.target, node.args):
            size = values[node.name].shape
            if math.prod(size) == size[1] * rows:
                one = [1, *size[1:]]
                return f"Expected more than 1 value per channel when training, got input size torch.Size({one})"
    return ""
