"""Inputs and results of a reference run.

The reference uses stages only through the narrow protocol :class:`StageFunctions`, so that it depends on the segment
functions and on nothing else of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from roundelay.ir.averages import NO_EMA
from roundelay.ir.clip import NO_CLIP, Clip
from roundelay.ir.deduction import Box
from roundelay.ir.loss_scale import NO_SCALE, LossScale
from roundelay.ir.rule import Mode, UpdateRule
from roundelay.ir.sbp import Split

Tensors = dict[str, torch.Tensor]
Named = list[tuple[str, torch.nn.Parameter]]
OptimizerFactory = Callable[[Named], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
CPU = torch.device("cpu")
Audit = Callable[[str, int, int, int, Mapping[str, torch.Tensor]], None]
"""(kind, stage, holder, number, tensors): ``forward`` and ``backward`` with g, ``update`` with t.

The holder is the replica's number times the workers of the mesh, and the worker's."""


class StageFunctions(Protocol):
    """Forward and backward of one stage; ``frontend.StageFunction`` is one."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that forward reads."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that forward returns; on the last stage with ``loss`` and, if any, ``loss.count``."""
        ...

    @property
    def parts(self) -> Sequence[StageFunctions]:
        """The parts between which values are boxed; itself alone without a mesh."""
        ...

    def forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        inputs: Mapping[str, Any],
        draw: Any,
        *,
        mode: Mode,
        measure: bool = False,
    ) -> tuple[dict[str, Any], Any]:
        """Return outputs by name, and the tape; entries of ``buffers`` that change are replaced, not modified."""
        ...

    def backward(
        self, tape: Any, grad_outputs: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Return the gradients of inputs and of parameters by name; a name without a gradient is missing."""
        ...


def use_threads(count: int) -> None:
    """Compute from now on with so many intra-op threads."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@dataclass(frozen=True, slots=True)
class ReferenceStage:
    """One stage.

    Args:
        functions: its forward and backward, on every worker of the mesh.
        parameters: names of the parameters that it owns.
        buffers: names of the buffers that it reads or changes.
        device: the device of its worker in the plan; the same operation has different bits on another kind of device.
        split: signatures of the parameters of which each worker has a part.
        partial: names of the parameters whose gradient is the sum of what the workers compute.
        states: signatures of the parameters of which each replica updates a part.
        made: names of those of which each micro-batch's gradients are summed over the replicas, and then added up.
        boxes: what is boxed between the parts of the functions, by name of the boxed value.
        turns: holders that take its micro-batches in turns; 0 where each replica has its own holder.
        updater: the replica that updates it, where one does for all, which then have its buffers in common.
        threads: intra-op threads with which its workers compute on the CPU: bits may depend on them.
    """

    functions: Sequence[StageFunctions]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    device: torch.device = CPU
    split: Mapping[str, Split] = field(default_factory=dict, hash=False)
    partial: frozenset[str] = frozenset()
    boxes: Mapping[str, Box] = field(default_factory=dict, hash=False)
    states: Mapping[str, Split] = field(default_factory=dict, hash=False)
    made: frozenset[str] = frozenset()
    turns: int = 0
    updater: int | None = None
    threads: int = 1

    def use_threads(self) -> None:
        """Compute from now on with its workers' number of intra-op threads."""
        use_threads(self.threads)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a reference run updates.

    Args:
        rule: which weights forward and backward read.
        predictor: ``improved``, ``paper``, ``released-code`` or ``partial``; ignored if the rule does not predict.
        mode: backward mode.
        clip: how gradients are clipped.
        loss_scale: how losses are scaled.
        numbers: metrics of the evaluations so far, for ``ReduceLROnPlateau``.
        ema: decay of the weights' exponential moving average; 0 for none.
        ema_at: the averages by parameter name at the start of the run; None to start from the weights.
        staggered: N where N micro-batches of a batch start evenly staggered, so that a rule's table holds for every
            batch, short ones included (Cyclic Data Parallelism); 0 for pipelines.
        labels_per_row: labels per row of the sample, where the loss is a mean over labels; else 0.
        shards: neighbouring replicas among which parameters are split; 0: all.
        loss_scale_at: a dynamic scale and its finite batches in a row at the start of a resumed run; else None.
    """

    rule: UpdateRule
    predictor: str
    mode: Mode
    clip: Clip = NO_CLIP
    loss_scale: LossScale = NO_SCALE
    numbers: tuple[float, ...] = ()
    ema: float = NO_EMA
    ema_at: Mapping[str, torch.Tensor] | None = field(default=None, hash=False)
    loss_scale_at: tuple[float, int] | None = None
    labels_per_row: float = 0.0
    staggered: int = 0
    shards: int = 0


@dataclass(slots=True)
class ReferenceResult:
    """The results of a reference run.

    Args:
        losses: by number, as the loss function returned it: the micro-batch's mean, or its sum.
        counts: by number; empty unless the loss returns (sum, count).
        metrics: by number: name to (value, number of terms summed in it or 0), as the loss function returned them.
        scales: by number: the loss scale; empty if losses are not scaled.
        loss_scale: a dynamic scale at the end, in the form of ``Setting.loss_scale_at``; None if it is constant.
        parameters: every parameter of the model by name, at the end.
        buffers: every buffer by name, at the end, of each replica.
        optimizer_state: by parameter name; a parameter that was never updated is missing.
        updates: version at the end: number of updates done, those before the run included.
    """

    losses: dict[int, float] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    loss_scale: tuple[float, int] | None = None
    parameters: Tensors = field(default_factory=dict)
    buffers: list[Tensors] = field(default_factory=list)
    optimizer_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    updates: int = 0
