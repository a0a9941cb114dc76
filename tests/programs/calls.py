"""What stands around the model and keeps something: inputs, batches, schedules, evaluations, the mode."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
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


def anew(made: Job, count: int = 6) -> Job:
    """The job with data that are made anew in every epoch."""
    return replace(made, batches=lambda epoch: batches(count=count))


@trains
def inputs_that_write_into_the_batch() -> Job:
    return anew(job(Body(), inputs=lambda batch: ((batch[0].div_(4.0),), {})))


@trains
def inputs_that_mask_what_the_loss_reads() -> Job:
    def masked(batch: Batch) -> Call:
        batch[0][:, ::3] = 0.0
        return (batch[0],), {}

    return anew(job(Body(), lambda outputs, batch: entropy(outputs, batch) + batch[0].abs().mean(), inputs=masked))


@refused(r"batch field '0', which Job\(inputs=...\) writes into: got a tensor of a list that is reused")
def inputs_that_write_into_a_list_of_batches() -> Job:
    return job(Body(), data=batches(count=2), inputs=lambda batch: ((batch[0].mul_(0.5),), {}))


@refused("batch field '0', which the model's forward writes into: got a tensor of a list that is reused")
def a_forward_that_writes_into_a_list_of_batches() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.sub_(0.1))

    return job(Model(), data=batches(count=2))


@refused("batch field '0', which the model's forward writes into: got a tensor that the loss reads afterwards")
def a_forward_that_masks_its_target() -> Job:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x[:, ::3] = 0.0
            return super().forward(x)

    return anew(job(Model(8, 8), lambda outputs, batch: functional.mse_loss(outputs, batch[0])))


@refused("which the model's forward writes into: got a tensor that the loss reads afterwards, as field '1'")
def a_batch_of_one_tensor_twice() -> Job:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
    data = [(x, x) for x, _ in batches()]
    return job(model, lambda outputs, batch: functional.mse_loss(outputs, batch[1]), data)


@refused(r"kept\['labels'\], which Job\(inputs=...\) sets and the model or the loss can read")
def inputs_that_leave_labels_for_the_loss() -> Job:
    kept: dict[str, Tensor] = {}

    def taken(batch: Batch) -> Call:
        kept["labels"] = batch[1]
        return (batch[0],), {}

    return job(Body(), lambda outputs, _: functional.cross_entropy(outputs, kept["labels"]), inputs=taken)


@trains
def inputs_that_count_for_themselves_in_a_shared_dict() -> Job:
    shared: dict[str, Any] = {"calls": 0, "weight": 0.5}

    def counted(batch: Batch) -> Call:
        shared["calls"] += 1
        return (batch[0] * (1.0 + 0.1 * shared["calls"]),), {}

    return job(Body(), lambda outputs, batch: entropy(outputs, batch) * shared["weight"], inputs=counted)


@refused(r"last\['outputs'\], which the loss sets, .*calls.py:\d+ `last\[\"outputs\"\] = ")
def a_loss_that_reads_its_last_outputs() -> Job:
    last: dict[str, Tensor] = {}

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        value = entropy(outputs, batch)
        if "outputs" in last:
            value = value + functional.mse_loss(outputs, last["outputs"])
        last["outputs"] = outputs.detach()
        return value

    return job(Body(), loss)


@refused(r"model.hidden, which the forward sets, .*calls.py:\d+ ")
def a_network_that_keeps_its_hidden_state() -> Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4)
            self.hidden = torch.zeros(1, 8, 8)

        def forward(self, x: Tensor) -> Any:
            made, hidden = self.cells(x.reshape(-1, 2, 4), self.hidden)
            self.hidden = hidden.detach()
            return self.head(made[:, -1])

    return job(Model())


@refused(r"weight\['auxiliary'\], changed by the job while it trains")
def batches_that_set_what_the_loss_reads() -> Job:
    weight = {"auxiliary": 0.0}

    def of_epoch(epoch: int) -> list[Batch]:
        weight["auxiliary"] = 0.5 * epoch
        return batches(count=2)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return entropy(outputs, batch) + weight["auxiliary"] * outputs.pow(2).mean()

    return replace(job(Body(), loss), batches=of_epoch)


@trains
def batches_that_count_epochs_for_themselves() -> Job:
    class Training:
        epoch, losses = 0, list[float]()

        def batches(self, epoch: int) -> list[Batch]:
            self.epoch = epoch
            return batches(count=2)

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            value = entropy(outputs, batch)
            self.losses.append(value.item())
            return value

    training = Training()
    return replace(job(Body(), training.loss), batches=training.batches)


@refused(r"hardness\['now'\], which the model or the loss sets and batches\(epoch\) can read")
def batches_that_read_what_the_loss_sets() -> Job:
    hardness = {"now": 0.0}

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        value = entropy(outputs, batch)
        hardness["now"] = value.item()
        return value

    def harder(epoch: int) -> list[Batch]:
        return [(x * (2.0 if hardness["now"] > 1.3 else 1.0), y) for x, y in batches()]

    return replace(job(Body(), loss), batches=harder)


@refused(r"weight\['of it'\], changed by the job while it trains")
def an_evaluation_that_sets_what_the_loss_reads() -> Job:
    weight = {"of it": 1.0}

    def evaluate(model: nn.Module) -> dict[str, float]:
        weight["of it"] = 2.0
        return {"loss": 0.0}

    return job(Body(), lambda o, b: weight["of it"] * entropy(o, b), batches(count=2), evaluate=evaluate)


@trains
def an_evaluation_that_returns_nothing() -> Job:
    return job(Body(), data=batches(count=2), evaluate=lambda model: None)


@refused(r"buffer 'scale', changed by Job\(evaluate=...\)")
def an_evaluation_that_changes_a_buffer() -> Job:
    def evaluate(model: nn.Module) -> dict[str, float]:
        model.get_buffer("scale").mul_(2.0)
        return {"loss": 0.0}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.register_buffer("scale", torch.ones(()))
            self.scale: Tensor

        def forward(self, x: Tensor) -> Any:
            return self.body(x) * self.scale

    return job(Model(), data=batches(count=2), evaluate=evaluate)


@refused(
    r"step pre hook `<lambda>` at .*calls.py:\d+: got a step that reads '.*', or its gradient, which it was not given"
)
def a_hook_that_clips_the_model_s_gradients() -> Job:
    model = Body()

    def made(named: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
        clip = nn.utils.clip_grad_norm_
        optimizer.register_step_pre_hook(lambda *_: (clip(model.parameters(), 0.1), None)[1])
        return optimizer

    return job(model, optimizer=made)


@trains
def labels_through_variable() -> Job:
    return job(Body(), lambda outputs, batch: functional.cross_entropy(outputs, torch.autograd.Variable(batch[1])))


@trains
def a_loss_that_now_and_then_notes_what_it_has_seen() -> Job:
    class Criterion:
        def __init__(self) -> None:
            self.calls, self.noted = 0, 0

        def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
            self.calls += 1
            if self.calls % 2 == 0:
                self.noted = self.calls
            return entropy(outputs, batch)

    return job(Body(), Criterion())


@trains
def a_metric_that_goes_on_from_call_to_call() -> Job:
    hits = {"right": 0.0, "all": 0}

    def loss(outputs: Tensor, batch: Any) -> dict[str, Any]:
        hits["right"] += float((outputs.argmax(1) == batch[1]).sum())
        hits["all"] += len(batch[1])
        return {"loss": entropy(outputs, batch), "accuracy": hits["right"] / hits["all"]}

    return job(Body(), loss)


@refused("'adjacency' of the model: got a tensor of layout torch.sparse_coo")
def a_sparse_buffer() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", torch.eye(8).to_sparse())
            self.adjacency: Tensor

        def forward(self, x: Tensor) -> Any:
            return super().forward(torch.sparse.mm(self.adjacency, x))

    return job(Model())
