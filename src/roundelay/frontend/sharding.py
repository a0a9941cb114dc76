"""What each worker of a mesh axis runs of a captured model, and what it has of the model's tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from roundelay.checkpoint.shards import Ranges, whole_ranges
from roundelay.frontend.export.export import Exported
from roundelay.frontend.mesh.find_sharding_rule import op_form
from roundelay.frontend.mesh.local_graph import MeshRank, local_graph, take_part
from roundelay.frontend.mesh.sharding_rules_base import shape_of
from roundelay.frontend.stage_builder import StageBuilder
from roundelay.ir.deduction import Box, Deduction, ShardedOp
from roundelay.ir.graph import INPUT, Graph
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import B, Signature, Split, local_shape


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model lies on the workers of an axis.

    Args:
        parts: how many there are.
        builders: each one's functions of stages.
        boxes: boxings, by the name of the boxed value.
        parameters: signature of every parameter that is split, by name.
        gradients: signature of every trained parameter's gradient, by name.
    """

    parts: int
    builders: tuple[StageBuilder, ...]
    boxes: Mapping[str, Box]
    parameters: Mapping[str, Split]
    gradients: Mapping[str, Signature]

    def local(self, name: str, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """One worker's part of a parameter, or of what has its shape, in memory of its own."""
        split = self.parameters.get(name)
        if split is None:
            return tensor
        return own_part(tensor, split, self.parts, part)

    def ranges(self, name: str, shape: Sequence[int], part: int) -> Ranges:
        """Where a worker's part of a parameter of this shape lies in the whole."""
        ranges = list(whole_ranges(shape))
        split = self.parameters.get(name)
        if split is not None:
            ranges[split.dim] = split_range(split, shape[split.dim], self.parts, part)
        return tuple(ranges)

    def whole_shapes(self, values: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """The shapes of all boxed values, as they are without the mesh.

        Args:
            values: the graph's inputs, by name.
        """
        exported = self.builders[0].exported
        nodes = {node.name: node for node in exported.module.graph.nodes}
        sizes: dict[Any, int] = {}
        for place, role in exported.roles.items():
            if role.kind == "input":
                sizes.update(zip(shape_of(nodes[place]) or (), values[INPUT + role.name].shape, strict=False))
        return {name: tuple([_known(size, sizes) for size in shape_of(nodes[name]) or ()]) for name in self.boxes}

    def as_boxed(self, name: str, tensor: torch.Tensor, whole: Sequence[int], *, gradient: bool) -> torch.Tensor:
        """A tensor of the shape that a boxing gives, without the others: to measure what is computed after it.

        Args:
            name: of the boxed value.
            tensor: what the first worker has of it, or of its gradient.
            whole: its shape without the mesh.
            gradient: which of the two.
        """
        box = self.boxes[name]
        source, target = (box.given, box.needed) if gradient else (box.source, box.target)
        parted = isinstance(source, Split) or isinstance(target, Split)
        if not parted or target is None or (gradient and source == B):
            return tensor
        return tensor.new_zeros(local_shape(whole, target, self.parts, 0))


def _known(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size that may be an expression of others."""
    return size if isinstance(size, int) else int(size.subs(sizes))


def own_part(tensor: torch.Tensor, split: Split, parts: int, part: int) -> torch.Tensor:
    """One part of a split tensor, in memory of its own."""
    return take_part(tensor, split=astuple(split), at=(parts, part)).clone(memory_format=torch.contiguous_format)


def split_range(split: Split, size: int, parts: int, part: int) -> tuple[int, ...]:
    """Where a part of a dimension of this size lies, as a range of a shard."""
    start, end = split.ranges(size, parts, part)[0]
    return (start, end) if split.outer == 1 else (start, end, size // split.outer)


def sharded_ops(exported: Exported, graph: Graph) -> list[ShardedOp]:
    """The operations of a model as the deduction of signatures sees them, with the places of parameters as names."""
    flops = {op.name: float(op.flops) for op in graph.ops}
    made = []
    for node in exported.module.graph.nodes:
        if node.op == "call_function":
            picks = node.target is operator.getitem and isinstance(node.args[0], Node)
            takes = (node.args[0].name, int(node.args[1])) if picks else None
            value = graph.values.get(node.name)
            differentiable = value is not None and value.requires_grad
            made.append(ShardedOp(node.name, op_form(node), flops.get(node.name, 0.0), takes, differentiable))
    return made


def parameter_places(exported: Exported) -> dict[str, str]:
    """The place in the exported graph of each parameter, by name."""
    return {role.name: place for place, role in exported.roles.items() if role.kind == "parameter"}


def sharded(
    builder: StageBuilder, boxed: Graph, forms: Mapping[str, OpForm], deduction: Deduction, parts: int
) -> Sharding:
    """What each worker runs.

    Args:
        builder: of the whole model.
        boxed: its graph with the boxings, and the sizes of what a worker has.
        forms: of every operation, by name.
        deduction: its signatures.
        parts: workers of the axis.

    Raises:
        PlanError: a size that is split is not known before the run.
    """
    places = parameter_places(builder.exported)
    signatures = {name: deduction.values.get(place, B) for name, place in places.items()}
    boxes = {box.name: box for box in deduction.boxes}
    at = [MeshRank(parts, part) for part in range(parts)]
    builders = [
        replace(
            builder,
            exported=local_graph(builder.exported, forms, deduction, place),
            graph=boxed,
            boxes=boxes,
            at=place,
            _pieces={},
            compiled={},
        )
        for place in at
    ]
    return Sharding(
        parts,
        tuple(builders),
        boxes,
        {name: signature for name, signature in signatures.items() if isinstance(signature, Split)},
        {name: deduction.gradients[place] for name, place in places.items() if place in deduction.gradients},
    )
