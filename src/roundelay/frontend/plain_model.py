"""Stages that have come as data, as a worker needs the model: without a mesh, and without the other stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from roundelay.checkpoint.shards import Ranges, whole_ranges
from roundelay.errors import InternalError
from roundelay.frontend.batch import Batch
from roundelay.frontend.plain_stage import rebuilt
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.frontend.stages.stage_function import StageFunction
from roundelay.ir.graph import Graph
from roundelay.ir.plain_graph import PlainStage
from roundelay.ir.residence import Residence
from roundelay.ir.sbp import Signature, Split
from roundelay.ir.stage import StageSpec
from roundelay.ir.value_layout import ValueLayout


@final
@dataclass(frozen=True, slots=True)
class PlainModel:
    """Some stages of a model, with the interface of :class:`roundelay.frontend.worker_model.WorkerModel`.

    Args:
        model: has the stages' parameters under their names.
        graph: what is said of the model beside its operations.
        plains: the stages, by number.
        layouts: what is known of the values that they receive and send.
    """

    model: torch.nn.Module
    graph: Graph
    plains: Mapping[int, PlainStage]
    layouts: Mapping[str, ValueLayout]
    residences: Mapping[str, Residence] = field(default_factory=dict)
    states: Mapping[str, Split] = field(default_factory=dict)

    def values(self, micro_batch: Batch) -> dict[str, torch.Tensor]:
        """Never called: the host reads."""
        raise self._bug("a micro-batch to read")

    def stage(
        self, spec: StageSpec, device: torch.device = CPU, *, halved: bool = False, part: int = 0
    ) -> StageFunction:
        """The functions of a stage."""
        if spec.stage not in self.plains or part:
            raise self._bug(f"stage {spec.stage} at place {part}")
        return rebuilt(self.plains[spec.stage], device, halved=halved)

    def flatten_recurrent(self, spec: StageSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: a stage that has come as data runs on the CPU."""

    def local(self, name: str, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """All of it."""
        return tensor

    def owned(self, name: str, local: torch.Tensor, replica: tuple[int, int]) -> torch.Tensor:
        """All of it."""
        return local

    def is_split(self, name: str) -> bool:
        """No parameter is."""
        return False

    def ranges(self, name: str, part: int, replica: tuple[int, int] = (1, 0)) -> Ranges:
        """All of a parameter."""
        return whole_ranges(self.graph.parameters[name].shape)

    def has_partial_gradient(self, name: str) -> bool:
        """No parameter has."""
        return False

    def layout(self, name: str) -> ValueLayout | None:
        """What the host has said of a value that comes."""
        return self.layouts.get(name)

    def boxing(self, name: str, *, gradient: bool) -> tuple[Signature, Signature]:
        """Never called: nothing is boxed."""
        raise self._bug(f"a boxing of {name}")

    def _bug(self, got: str) -> InternalError:
        return InternalError(
            f"stages {[*self.plains]}, which have come as data",
            got=got,
            expected="only what these stages need, without a mesh",
            remedy="Report this as a bug.",
        )


def module_of(parameters: Mapping[str, torch.nn.Parameter]) -> torch.nn.Module:
    """A module that has parameters under these names, such as ``0.weight``."""
    root = torch.nn.Module()
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        owner = root
        for word in path:
            if word not in owner._modules:
                owner.add_module(word, torch.nn.Module())
            owner = owner.get_submodule(word)
        owner.register_parameter(last, parameter)
    return root
