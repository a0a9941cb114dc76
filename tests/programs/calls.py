"""What stands around the model and keeps something: inputs, batches, schedules, evaluations, the mode."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from roundelay import Job
from tests.programs.table import Batch, Body, batches, entropy, job, refused, trains

Call = tuple[tuple[Tensor], dict[str, Any]]


@trains
def inputs_that_count() -> Job:
    class Warm:
        calls = 0

        def __call__(self, batch: Batch) -> Call:
            self.calls += 1
            return (batch[0] * min(1.0, 0.2 * self.calls),), {}

    return job(Body(), inputs=Warm())


@trains
def inputs_from_an_iterator() -> Job:
    scales = iter([0.5, 1.0, 1.5, 2.0, 2.5, 3.0] * 50)
    return job(Body(), inputs=lambda batch: ((batch[0] * next(scales),), {}))


@trains
def inputs_that_keep_a_mean() -> Job:
    mean = torch.zeros(8)

    def centred(batch: Batch) -> Call:
        mean.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
        return (batch[0] - mean,), {}

    return job(Body(), inputs=centred)


@trains
def inputs_mixed_by_numpy() -> Job:
    def mixed(batch: Batch) -> Call:
        share = float(np.random.beta(0.4, 0.4))
        return (share * batch[0] + (1 - share) * batch[0].flip(0),), {}

    return job(Body(), inputs=mixed)


@trains
def inputs_flipped_at_random() -> Job:
    return job(Body(), inputs=lambda batch: ((batch[0].flip(1) if random.random() < 0.5 else batch[0],), {}))


@refused(r"batches\(epoch\), which calls the model, .*calls.py:\d+ ")
def batches_that_ask_the_model() -> Job:
    model, data = Body(), batches()

    def hardest(epoch: int) -> Iterator[Batch]:
        for x, y in data:
            with torch.no_grad():
                rows = functional.cross_entropy(model(x), y, reduction="none").argsort()[4:]
            yield x[rows], y[rows]

    made = job(model)
    return Job(model=model, loss=made.loss, batches=hardest, optimizer=made.optimizer)


@refused(r"LambdaLR with `.*` at .*: got a schedule that changes weight\['of the penalty'\], which the model, the loss")
def a_schedule_that_tells_the_loss() -> Job:
    weight = {"of the penalty": 0.0}

    def rate(update: int) -> float:
        weight["of the penalty"] = min(1.0, update / 5)
        return 1.0

    def scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, rate)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return entropy(outputs, batch) + weight["of the penalty"] * outputs.pow(2).mean()

    return job(Body(), loss, scheduler=scheduler)


@trains
def a_layer_that_train_leaves_in_eval_mode() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.norm.running_mean.fill_(0.3)

        def train(self, mode: bool = True) -> Model:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.norm(self.first(x)))

    return job(Model(), evaluate=lambda model: {"loss": 0.0})


@refused(r"centre, which the loss sets, .*calls.py:\d+ `centre.mul_")
def a_centre_that_the_loss_moves() -> Job:
    centre = torch.zeros(4)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        value = entropy(outputs - centre, batch)
        with torch.no_grad():
            centre.mul_(0.9).add_(outputs.mean(0), alpha=0.1)
        return value

    return job(Body(), loss)


@refused(r"loss.scale, which the loss sets, .*calls.py:\d+ `self.scale.mul_")
def a_buffer_of_the_loss() -> Job:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.scale: Tensor

        def forward(self, outputs: Tensor, batch: Any) -> Tensor:
            value = entropy(outputs, batch)
            self.scale.mul_(0.9).add_(0.1 * value.detach())
            return value / self.scale

    return job(Body(), Criterion())


@refused(r"counts, which the loss sets, .*calls.py:\d+ `np.add.at")
def a_histogram_of_labels() -> Job:
    counts = np.ones(4)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        np.add.at(counts, batch[1].numpy(), 1)
        return functional.cross_entropy(outputs, batch[1], weight=torch.tensor(counts.sum() / counts).float())

    return job(Body(), loss)


@refused(r"teacher.a.weight, which the loss sets, .*calls.py:\d+ `own.mul_")
def a_teacher_that_the_loss_moves() -> Job:
    model = Body()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            for own, weight in zip(teacher.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(weight, alpha=0.1)
            told = teacher(batch[0])
        return entropy(outputs, batch) + functional.mse_loss(outputs, told)

    return job(model, loss)


@refused(r"teacher.norm.running_mean, which the loss sets, .*calls.py:\d+ ")
def a_teacher_whose_statistics_move() -> Job:
    teacher = nn.Sequential()
    teacher.add_module("first", nn.Linear(8, 4))
    teacher.add_module("norm", nn.BatchNorm1d(4))

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            told, _ = teacher.eval()(batch[0]), teacher.train()(batch[0])
        return entropy(outputs, batch) + functional.mse_loss(outputs, told)

    return job(Body(), loss)


@trains
def a_loss_that_counts_and_does_not_read() -> Job:
    counts, last = np.zeros(4), torch.zeros(8, 4)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        np.add.at(counts, batch[1].numpy(), 1)
        last[: len(outputs)] = outputs.detach()
        return entropy(outputs, batch)

    return job(Body(), loss)
