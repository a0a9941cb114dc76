"""What a worker needs of the model: the captured one, or a stage of it that has come as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from roundelay.checkpoint.shards import Ranges
from roundelay.frontend.batch import Batch
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.frontend.stages.stage_function import StageFunction
from roundelay.ir.graph import Graph
from roundelay.ir.residence import Residence
from roundelay.ir.sbp import Signature, Split
from roundelay.ir.stage import StageSpec
from roundelay.ir.value_layout import ValueLayout


class WorkerModel(Protocol):
    """:class:`roundelay.frontend.capture.Captured`, which documents these, or :class:`PlainModel`."""

    @property
    def model(self) -> torch.nn.Module:
        """The module whose parameters are trained."""
        ...

    @property
    def graph(self) -> Graph:
        """Its description."""
        ...

    @property
    def residences(self) -> Mapping[str, Residence]:
        """Of parameters of which each replica updates a part."""
        ...

    @property
    def states(self) -> Mapping[str, Split]:
        """How their optimizer's states are split."""
        ...

    def values(self, micro_batch: Batch) -> dict[str, torch.Tensor]:
        """What enters the graph, from a micro-batch."""
        ...

    def stage(
        self, spec: StageSpec, device: torch.device = CPU, *, halved: bool = False, part: int = 0
    ) -> StageFunction:
        """The functions of a stage."""
        ...

    def flatten_recurrent(self, spec: StageSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """Move weights of recurrent layers into one memory, on a GPU."""
        ...

    def local(self, name: str, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """What a worker of the mesh has of a parameter."""
        ...

    def owned(self, name: str, local: torch.Tensor, replica: tuple[int, int]) -> torch.Tensor:
        """What a replica updates of it."""
        ...

    def is_split(self, name: str) -> bool:
        """Whether each worker of the mesh has a part of a parameter."""
        ...

    def ranges(self, name: str, part: int, replica: tuple[int, int] = (1, 0)) -> Ranges:
        """Where what a holder updates lies in the whole."""
        ...

    def has_partial_gradient(self, name: str) -> bool:
        """Whether a gradient is a sum over the mesh."""
        ...

    def layout(self, name: str) -> ValueLayout | None:
        """What is known of a value, of each micro-batch."""
        ...

    def boxing(self, name: str, *, gradient: bool) -> tuple[Signature, Signature]:
        """From what to what a value is boxed."""
        ...
