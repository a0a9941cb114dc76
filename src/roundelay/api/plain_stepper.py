"""The person's own program: their model, loss, optimizer and scheduler in the loop that everybody writes.

Nothing of what capture makes is used here: what comes of it is what a captured job is held to. It changes the person's
objects, so it belongs in a forked child.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from roundelay.api.shared_tensors import Index, SharedTensors
from roundelay.frontend import RngKey
from roundelay.frontend.batch import Batch, fresh
from roundelay.frontend.export_adapter import default_inputs
from roundelay.frontend.label_counts import LabelWatch
from roundelay.frontend.loss import checked
from roundelay.frontend.loss_metrics import split as without_metrics
from roundelay.frontend.precision import autocast
from roundelay.frontend.retarget_device import CPU
from roundelay.ir.clip import Clip
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.job import Job

Part = tuple[MicroBatch, Batch]
"""A micro-batch: its header and what the loader gave for it."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one update has shown; JSON can hold its fields.

    Args:
        losses: of every micro-batch: what the loss returned, and the terms summed in it, or 0.
        metrics: of every micro-batch, by name; a pair as two numbers.
        generators: of every micro-batch, what stands for torch's generator behind its forward and loss.
        gradients: by parameter name, as the optimizer would get them without clipping.
        clipped: as it gets them, where they are clipped.
        rates: learning rate of every group in this update.
        weights: of every parameter behind it.
        buffers: of every buffer behind it.
    """

    losses: list[list[float]]
    metrics: list[dict[str, list[float]]]
    generators: list[int]
    gradients: Index
    clipped: Index
    rates: list[float]
    weights: Index
    buffers: Index


@dataclass(slots=True)
class _Told:
    """What the micro-batches of an update have shown."""

    losses: list[list[float]] = field(default_factory=list)
    metrics: list[dict[str, list[float]]] = field(default_factory=list)
    generators: list[int] = field(default_factory=list)
    labels: float = 0.0


@final
class PlainStepper:
    """One training in plain PyTorch.

    Args:
        job: the job; its own objects are trained.
        plan: precision, clipping, loss scale and average of the weights.
        seed: of the run.
        room: where tensors are left.
        labels_per_row: where the loss is a mean over labels, by whose number parts of a batch are weighed; else 0.
    """

    def __init__(self, job: Job, plan: Plan, seed: int, room: SharedTensors, *, labels_per_row: float = 0.0) -> None:
        self._labels_per_row = labels_per_row
        self._job, self._plan, self._seed, self._room = job, plan, seed, room
        self.model = job.model
        if not self.model.training:  # else parts may be in eval mode on purpose, as capture has it
            self.model.train()
        self.named = list(self.model.named_parameters())
        self.optimizer = job.optimizer(list(self.named))
        self.switches = all(callable(getattr(self.optimizer, mode, None)) for mode in ("train", "eval"))
        if self.switches:  # schedule-free
            self.optimizer.train()  # type: ignore[attr-defined]
        scheduler: Any = None if job.scheduler is None else job.scheduler(self.optimizer)
        self.scheduler = None if isinstance(scheduler, ReduceLROnPlateau) else scheduler
        self._clip, self._scale_rule = Clip.parse(plan.clip), LossScale.parse(plan.loss_scale)
        self._scale = self._scale_rule.first or 1.0
        self.averages = {n: p.detach().clone() for n, p in self.named if plan.ema and p.requires_grad}

    def update(self, parts: Sequence[Part]) -> Update:
        """Train on one batch, cut into these parts."""
        told = _Told()
        self.optimizer.zero_grad()
        for _, parameter in self.named:  # also of those that the optimizer does not hold
            parameter.grad = None
        for header, batch in parts:
            self._micro_batch(header, batch, told)
        gradients = self._mean_gradients(told.labels or sum(count for _, count in told.losses))
        left = self._room.leave(gradients)
        finite = not self._scale_rule.on or all(bool(g.isfinite().all()) for g in gradients.values())
        clipped: Index = {}
        if self._clip.by == "global" and finite:
            torch.nn.utils.clip_grad_norm_([p for _, p in self.named if p.grad is not None], self._clip.norm)
            clipped = self._room.leave({n: p.grad for n, p in self.named if p.grad is not None})
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._step(parts[0][0].batch, finite=finite)
        return Update(
            told.losses,
            told.metrics,
            told.generators,
            left,
            clipped,
            rates,
            self._room.leave(dict(self.model.named_parameters())),
            self._room.leave(dict(self.model.named_buffers())),
        )

    def _micro_batch(self, header: MicroBatch, batch: Batch, told: _Told) -> None:
        own = fresh(batch)
        torch.manual_seed(seed_of(self._seed, header.g))
        args, kwargs = (self._job.inputs or default_inputs)(own)
        with autocast(self._plan.precision, CPU), LabelWatch() if self._labels_per_row else nullcontext() as watch:
            value = self._job.loss(self.model(*args, **kwargs), own)
        told.generators.append(generator_now())
        loss, count = checked(value)
        weight = header.weight if count is None else 1.0
        if watch is not None and header.count > 1:
            weight = self._share(header, watch, value, told)
        if weight:  # a part without any label has no mean, and nothing to add
            (loss * (self._scale * weight)).backward()
        told.losses.append([float(loss.detach()) if weight else 0.0, 0.0 if count is None else float(count)])
        told.metrics.append(numbers(without_metrics(value)[1]))

    def _share(self, header: MicroBatch, watch: LabelWatch, value: Any, told: _Told) -> float:
        """A part's share of the batch's labels, about 1 in all: the batch's gradients are divided by what it is."""
        terms = watch.terms_of(without_metrics(value)[0])
        share = 0.0 if terms is None else float(terms) / (header.batch_rows * self._labels_per_row)
        told.labels += share
        return share

    def _mean_gradients(self, count: float) -> dict[str, torch.Tensor]:
        """The parameters' gradients, of which a loss that sums has the mean over its terms."""
        over = self._scale * (count or 1.0)
        for _, parameter in self.named:
            if parameter.grad is not None and over != 1.0:
                parameter.grad = parameter.grad / over
        return {n: p.grad for n, p in self.named if p.grad is not None}

    def _step(self, update: int, *, finite: bool) -> None:
        torch.manual_seed(seed_of(self._seed, -1 - update))
        if finite:
            self.optimizer.step()
        elif self._scale_rule.dynamic:
            self._scale /= 2.0
        with torch.no_grad():
            for name, parameter in self.named:
                if name in self.averages:
                    self.averages[name].lerp_(parameter, 1.0 - self._plan.ema)
        if self.scheduler is not None:
            self.scheduler.step()


def seed_of(seed: int, g: int) -> int:
    """Under which seed of torch's own generator both sides run micro-batch ``g``, or the step of update ``-1 - g``."""
    return RngKey(seed, g & ((1 << 62) - 1)).key(0)


def generator_now() -> int:
    """What stands for the state of torch's own generator: another number if more or less has been drawn."""
    before = torch.random.get_rng_state()
    number = int(torch.randint(0, 2**62, ()))
    torch.random.set_rng_state(before)
    return number


def numbers(metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """What the loss has returned beside the loss, as numbers; what is none, is told by the run."""
    found = {}
    for name, metric in metrics.items():
        parts = metric if isinstance(metric, (tuple, list)) else (metric,)
        found[name] = [float(part) for part in parts]
    return found


def same_number(one: float, two: float) -> bool:
    """Whether two numbers are one, or both are none."""
    return one == two or (math.isnan(one) and math.isnan(two))
