"""A graph as it lies on a plan's mesh: with its boxings, the sizes of what a worker has, and signatures. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from roundelay.ir.bucket import Tensor
from roundelay.ir.deduction import Box
from roundelay.ir.graph import Graph
from roundelay.ir.residence import Residence
from roundelay.ir.sbp import P, Signature, Split, local_shape


@dataclass(frozen=True)
class LaidGraph:
    """A graph on a mesh.

    Args:
        graph: with an operation for each boxing, and the bytes that the first worker has.
        parts: workers of the mesh.
        boxes: boxings, by the name of the boxed value.
        splits: signature of every parameter that is split.
        gradients: signature of every trained parameter's gradient, on a mesh.
        residences: of parameters of which each replica updates a part.
    """

    graph: Graph
    parts: int = 1
    boxes: Mapping[str, Box] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    gradients: Mapping[str, Signature] = field(default_factory=dict)
    residences: Mapping[str, Residence] = field(default_factory=dict)

    @cached_property
    def states(self) -> dict[str, Split]:
        """How the optimizer's states of parameters are split over replicas."""
        return {name: residence.state for name, residence in self.residences.items()}

    @property
    def on_mesh(self) -> bool:
        """Whether stages are on more than one worker each."""
        return self.parts > 1

    def has_partial_gradient(self, name: str) -> bool:
        """Whether each worker of the mesh has a part of the sum that is a parameter's gradient."""
        return self.gradients.get(name) == P

    def tensors(self, names: Iterable[str]) -> list[Tensor]:
        """What the first worker has of these parameters."""
        return [Tensor(name, self.graph.parameters[name].dtype, self._shape(name)) for name in names]

    def _shape(self, name: str) -> tuple[int, ...]:
        shape, split = self.graph.parameters[name].shape, self.splits.get(name)
        return tuple(shape) if split is None else local_shape(shape, split, self.parts, 0)
