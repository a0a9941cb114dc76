"""A captured model over the workers of one mesh axis: its signatures, its boxings, and what each worker runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

import torch
from torch.fx import Node

from roundelay.errors import PlanError
from roundelay.frontend.export import Exported
from roundelay.frontend.local_graph import Part, local_graph, take_part
from roundelay.frontend.op_forms import op_form
from roundelay.frontend.stage_builder import StageBuilder
from roundelay.ir.graph import Graph
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import B, Signature, Split
from roundelay.lower.boxed_graph import boxed_graph
from roundelay.lower.signatures import Box, Deduction, ShardedOp, deduce, megatron


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model lies on the workers of an axis.

    Args:
        parts: how many there are.
        builders: each one's functions of stages.
        boxes: boxings, by the name of the boxed value.
        parameters: signature of every parameter that is split, by name.
        gradients: signature of every parameter's gradient.
    """

    parts: int
    builders: tuple[StageBuilder, ...]
    boxes: Mapping[str, Box]
    parameters: Mapping[str, Split]
    gradients: Mapping[str, Signature]

    def local(self, name: str, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """One worker's part of a parameter, or of what has its shape."""
        split = self.parameters.get(name)
        if split is None:
            return tensor
        return take_part(tensor, split=astuple(split), at=(self.parts, part)).contiguous()


def shard(builder: StageBuilder, parts: int, given: Mapping[str, Signature]) -> tuple[Graph, Sharding]:
    """Deduce the signatures of a model, and make what each worker runs; also returns the graph with the boxings.

    Args:
        builder: of the whole model.
        parts: workers of the axis.
        given: signatures of parameters, by name; with none Megatron-LM's are found.

    Raises:
        PlanError: a signature does not fit, or a boxing has no place.
    """
    exported, graph = builder.exported, builder.graph
    places = {role.name: place for place, role in exported.roles.items() if role.kind == "parameter"}
    forms = {n.name: op_form(n) for n in exported.module.graph.nodes if n.op == "call_function"}
    ops = _operations(exported, graph, forms)
    for name, signature in given.items():
        _check_signature(graph, name, signature, parts)
    shapes = {place: graph.parameters[name].shape for name, place in places.items()}
    seeds = {places[name]: signature for name, signature in given.items()} or megatron(ops, shapes, parts)
    weights = {places[n]: float(p.num_bytes) for n, p in graph.parameters.items() if p.trainable and n in places}
    sizes = {name: float(value.num_bytes) for name, value in graph.values.items()} | weights
    deduction = deduce(ops, seeds, sizes, parts, dict.fromkeys(graph.outputs, B), weights)
    boxed = boxed_graph(graph, deduction)
    return boxed, _sharding(builder, boxed, forms, deduction, places, parts)


def _operations(exported: Exported, graph: Graph, forms: Mapping[str, OpForm]) -> list[ShardedOp]:
    flops = {op.name: float(op.flops) for op in graph.ops}
    made = []
    for node in exported.module.graph.nodes:
        if node.op == "call_function":
            picks = node.target is operator.getitem and isinstance(node.args[0], Node)
            takes = (node.args[0].name, int(node.args[1])) if picks else None  # type: ignore[union-attr, arg-type]
            value = graph.values.get(node.name)
            differentiable = value is not None and value.requires_grad
            made.append(ShardedOp(node.name, forms[node.name], flops.get(node.name, 0.0), takes, differentiable))
    return made


def _sharding(
    builder: StageBuilder,
    boxed: Graph,
    forms: Mapping[str, OpForm],
    deduction: Deduction,
    places: Mapping[str, str],
    parts: int,
) -> Sharding:
    signatures = {name: deduction.values.get(place, B) for name, place in places.items()}
    return Sharding(
        parts,
        tuple(
            replace(
                builder,
                exported=local_graph(builder.exported, forms, deduction, Part(parts, part)),
                graph=boxed,
                _pieces={},
                compiled={},
            )
            for part in range(parts)
        ),
        {box.name: box for box in deduction.boxes},
        {name: signature for name, signature in signatures.items() if isinstance(signature, Split)},
        {name: deduction.gradients[place] for name, place in places.items() if place in deduction.gradients},
    )


def _check_signature(graph: Graph, name: str, signature: Signature, parts: int) -> None:
    parameter = graph.parameters[name]
    fits = signature == B
    if isinstance(signature, Split) and signature.dim < len(parameter.shape):
        size = parameter.shape[signature.dim]
        fits = signature.fits(size) and signature.count(size) >= parts
    if not fits:
        raise PlanError(
            f"the signature of parameter {name!r}",
            got=f"{signature} over {parts} workers",
            expected=f"B, or a split of one of its dimensions, of sizes {parameter.shape}, into {parts} parts or more",
            remedy="Correct `parameters` of the plan.",
        )
