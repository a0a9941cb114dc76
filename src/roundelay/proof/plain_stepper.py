"""The user's program in plain PyTorch: model, loss, optimizer and scheduler in the usual training loop.

It uses nothing that capture has made: a captured job is compared with its results. It changes the user's objects: on
the CPU it runs in a forked child, on a GPU they are put back afterwards (:mod:`roundelay.proof.fidelity_in_process`).
There the model has been moved to the device, what ``inputs`` returns is, and so is the batch that the loss gets;
tensors that model and loss make or hold follow (:mod:`roundelay.frontend.stages.on_device`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from roundelay.frontend import RngKey
from roundelay.frontend.batch import Batch, fresh, replace
from roundelay.frontend.export.export_adapter import default_inputs
from roundelay.frontend.label_counts import LabelWatch
from roundelay.frontend.loss import checked
from roundelay.frontend.loss_metrics import split as without_metrics
from roundelay.frontend.stages.keyed_rng import default_generators, set_states
from roundelay.frontend.stages.on_device import OnDevice, on_device
from roundelay.frontend.stages.precision import autocast
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.proof.shared_memory_tensors import Index, SharedTensors
from roundelay.runtime.optimizer.stage_optimizer import choose_alike

MicroBatchPart = tuple[MicroBatch, Batch]
"""A micro-batch: its header and the loader's rows for it."""


@dataclass(slots=True)
class Update:
    """The results of one update; its fields can be written as JSON.

    Args:
        losses: of every micro-batch: the loss, and the number of terms summed in it, or 0.
        metrics: of every micro-batch, by name; a pair as two numbers.
        generators: of every micro-batch, torch's generator state after its forward and loss, as a number.
        gradients: by parameter name, before clipping.
        clipped: by parameter name, after clipping; empty without.
        rates: learning rate of every group in this update.
        weights: every parameter after it.
        buffers: every buffer after it.
    """

    losses: list[list[float]] = field(default_factory=list)
    metrics: list[dict[str, list[float]]] = field(default_factory=list)
    generators: list[int] = field(default_factory=list)
    gradients: Index = field(default_factory=dict)
    clipped: Index = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    weights: Index = field(default_factory=dict)
    buffers: Index = field(default_factory=dict)


@final
class PlainStepper:
    """One training in plain PyTorch.

    Args:
        job: the job, whose objects are trained.
        plan: precision, clipping, loss scale and average of the weights.
        seed: of the run.
        shared: where tensors are stored.
        labels_per_row: if the loss is a mean over labels, by whose number micro-batches are weighted; else 0.
        device: the device on which it trains, where the model is already.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        seed: int,
        shared: SharedTensors,
        *,
        labels_per_row: float = 0.0,
        device: torch.device = CPU,
    ) -> None:
        self._labels_per_row, self._device = labels_per_row, device
        self._job, self._plan, self._seed, self._shared = job, plan, seed, shared
        self._on_device = on_device(device, self._loss_of)
        self.model = job.model
        if not self.model.training:  # else submodules may be in eval mode on purpose, as capture keeps them
            self.model.train()
        self.named = list(self.model.named_parameters())
        self.optimizer = job.optimizer(list(self.named))
        choose_alike(self.optimizer, (CPU.type, device.type) if self._shares_memory() else plan.devices)
        self.has_eval_mode = all(callable(getattr(self.optimizer, mode, None)) for mode in ("train", "eval"))
        if self.has_eval_mode:  # schedule-free
            self.optimizer.train()  # type: ignore[attr-defined]
        scheduler: Any = None if job.scheduler is None else job.scheduler(self.optimizer)
        self.scheduler = None if isinstance(scheduler, ReduceLROnPlateau) else scheduler
        self._clip, self._scale_rule = plan.clip, plan.loss_scale
        self._scale = self._scale_rule.first or 1.0
        self.averages = {n: p.detach().clone() for n, p in self.named if plan.ema and p.requires_grad}

    def _shares_memory(self) -> bool:
        """Whether some parameters share memory, which an update of many in one call would write to at once."""
        addresses = [parameter.data_ptr() for _, parameter in self.named if parameter.numel()]
        return len(set(addresses)) < len(addresses)

    def update(self, parts: Sequence[MicroBatchPart]) -> Update:
        """Train on one batch, cut into these micro-batches."""
        update = Update()
        self.optimizer.zero_grad()
        for _, parameter in self.named:  # also those that the optimizer does not hold
            parameter.grad = None
        labels = 0.0
        for header, batch in parts:
            labels += self._micro_batch(header, batch, update)
        gradients = self._mean_gradients(labels or sum(count for _, count in update.losses))
        update.gradients = self._shared.put_all(gradients)
        finite = not self._scale_rule.on or all(bool(g.isfinite().all()) for g in gradients.values())
        if self._clip.by == "global" and finite:
            torch.nn.utils.clip_grad_norm_([p for _, p in self.named if p.grad is not None], self._clip.norm)
            update.clipped = self._shared.put_all({n: p.grad for n, p in self.named if p.grad is not None})
        update.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._step(parts[0][0].batch, finite=finite)
        update.weights = self._shared.put_all(dict(self.model.named_parameters()))
        update.buffers = self._shared.put_all(dict(self.model.named_buffers()))
        return update

    def _micro_batch(self, header: MicroBatch, batch: Batch, update: Update) -> float:
        """Forward and backward; returns the micro-batch's share of the batch's labels, 0 if they are not counted.

        The shares' sum is about 1; the batch's gradients are divided by it.
        """
        own = fresh(batch)
        torch.manual_seed(seed_of(self._seed, header.g))
        args, kwargs = (self._job.inputs or default_inputs)(own)
        args, kwargs, own = self._moved((args, kwargs, own))
        value, terms = self._on_device(args, kwargs, own)
        update.generators.append(generator_now())
        loss, count = checked(value)
        weight, labels = header.weight if count is None else 1.0, 0.0
        if self._labels_per_row and not header.whole:
            labels = 0.0 if terms is None else float(terms) / (header.batch_rows * self._labels_per_row)
            weight = labels
        if weight:  # a micro-batch without labels has no mean, and adds nothing
            with nullcontext() if self._device == CPU else OnDevice(self._device):
                (loss * (self._scale * weight)).backward()
        update.losses.append([float(loss.detach()) if weight else 0.0, 0.0 if count is None else float(count)])
        update.metrics.append(metric_numbers(without_metrics(value)[1]))
        return labels

    def _loss_of(self, args: Any, kwargs: Any, batch: Batch) -> tuple[Any, torch.Tensor | None]:
        """What the loss returns, and its number of labels if they are counted."""
        watching = LabelWatch() if self._labels_per_row else nullcontext()
        with autocast(self._plan.precision, self._device), watching as watch:
            value = self._job.loss(self.model(*args, **kwargs), batch)
        return value, None if watch is None else watch.terms_of(without_metrics(value)[0])

    def _moved(self, batch: Batch) -> Batch:
        """The same on the device; a tensor that occurs twice occurs twice there."""
        if self._device == CPU:
            return batch
        moved: dict[int, torch.Tensor] = {}
        return replace(batch, lambda _, leaf: moved.setdefault(id(leaf), leaf.to(self._device)))

    def _mean_gradients(self, count: float) -> dict[str, torch.Tensor]:
        """The parameters' gradients without the loss scale; of a loss that sums, their mean over its terms."""
        divisor = self._scale * (count or 1.0)
        for _, parameter in self.named:
            if parameter.grad is not None and divisor != 1.0:
                parameter.grad = parameter.grad / divisor
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
    """Seed of torch's default generator for micro-batch ``g``, or for the step of update ``-1 - g`` if negative."""
    return RngKey(seed, g & ((1 << 62) - 1)).key(0)


def generator_now() -> int:
    """A number for the state of torch's default generators: another one if more or fewer numbers were drawn."""
    generators = default_generators()
    before = [generator.get_state() for generator in generators]
    numbers = [int(torch.randint(0, 2**62, (), generator=one, device=one.device)) for one in generators]
    set_states(generators, before)
    return functools.reduce(operator.xor, numbers)


def metric_numbers(metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """The loss function's metrics as lists of numbers."""
    numbers = {}
    for name, metric in metrics.items():
        parts = metric if isinstance(metric, (tuple, list)) else (metric,)
        numbers[name] = [float(part) for part in parts]
    return numbers
