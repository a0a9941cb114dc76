"""What a loss reads, keeps and returns."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay import Job
from tests.programs.table import Body, batches, entropy, job, refused, trains


@trains
def a_penalty_over_weights() -> Job:
    model = Body()
    return job(model, lambda o, b: entropy(o, b) + 0.05 * sum(p.pow(2).sum() for p in model.parameters()))


@trains
def a_penalty_over_weights_by_name() -> Job:
    model = Body()

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return entropy(outputs, batch) + 0.1 * sum(p.abs().sum() for n, p in model.named_parameters() if "weight" in n)

    return job(model, loss)


@trains
def a_penalty_over_a_list_of_weights() -> Job:
    model = Body()
    weights = list(model.parameters())
    return job(model, lambda o, b: entropy(o, b) + 0.01 * sum(p.norm() for p in weights))


@refused("the loss, which reads parameter 'a.weight' of the model: got a weight kept where it cannot be replaced")
def a_penalty_over_a_tuple_of_weights() -> Job:
    model = Body()
    weights = tuple(model.parameters())
    return job(model, lambda o, b: entropy(o, b) + 0.01 * sum(p.norm() for p in weights))


@trains
def a_loss_with_its_model_in_a_partial() -> Job:
    def loss(outputs: Tensor, batch: Any, model: Any) -> Tensor:
        apart = model.b.weight @ model.b.weight.t() - torch.eye(16)
        return entropy(outputs, batch) + apart.pow(2).mean()

    model = Body()
    return job(model, functools.partial(loss, model=model))


@trains
def a_head_that_the_loss_calls() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.b(self.first(x)))

    model = Model()
    return job(model, lambda outputs, batch: entropy(model.c(outputs), batch))


@trains
def a_loss_that_calls_the_model_again() -> Job:
    model = Body()
    return job(model, lambda o, b: entropy(o, b) + functional.mse_loss(o, model(b[0] * 0.9)))


@trains
def a_method_of_the_model() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.log_sigma = nn.Parameter(torch.zeros(()))

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return entropy(outputs, batch) * (-self.log_sigma).exp() + self.log_sigma

    model = Model()
    return job(model, model.loss)


@trains
def an_object_that_holds_the_model() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.aux = h.mean()
            return self.rest(h)

    class Criterion:
        def __init__(self, model: Any) -> None:
            self.model, self.alpha = model, 0.5

        def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
            return entropy(outputs, batch) + self.alpha * self.model.aux

    model = Model()
    return job(model, Criterion(model))


@trains
def class_weights_in_a_module() -> Job:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return job(Body(), lambda outputs, batch: criterion(outputs, batch[1]))


@trains
def a_teacher() -> Job:
    teacher = Body().eval()

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            goal = teacher(batch[0])
        return entropy(outputs, batch) + functional.mse_loss(outputs, goal)

    return job(Body(), loss)


@trains
def a_scripted_function() -> Job:
    @torch.jit.script
    def focal(logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1).gather(1, labels.unsqueeze(1))
        return -(((1 - log_p.exp()) ** 2) * log_p).mean()

    return job(Body(), lambda outputs, batch: focal(outputs, batch[1]))


@trains
def metrics_beside_it() -> Job:
    model = Body()

    def loss(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        right = (outputs.argmax(1) == batch[1]).float().mean()
        return {"loss": entropy(outputs, batch), "accuracy": right, "norm": model.b.weight.detach().norm()}

    return job(model, loss)


@trains
def a_history_of_losses() -> Job:
    history: list[float] = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        value = entropy(outputs, batch)
        history.append(value.item())
        return value

    return job(Body(), loss)


@refused(r"st\['calls'\], which the loss sets, .*: got a state that the next call reads")
def a_counter_in_a_dict() -> Job:
    st = {"calls": 0}

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        st["calls"] += 1
        return entropy(outputs, batch) * min(1.0, st["calls"] / 5)

    return job(Body(), loss)


@refused("calls, which the loss sets")
def a_counter_in_a_closure() -> Job:
    calls = 0

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return entropy(outputs, batch) * (1 + calls)

    return job(Body(), loss)


@refused(r"loss.calls, which the loss sets, .*losses.py:\d+ `self.calls \+= 1`")
def a_counter_that_matters_late() -> Job:
    class Criterion:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
            self.calls += 1
            return entropy(outputs, batch) * (2.0 if self.calls > 500 else 1.0)

    return job(Body(), Criterion())


@refused(r"loss.mean, which the loss sets, .*losses.py:\d+ `self.mean = ")
def an_average_of_losses() -> Job:
    class Criterion:
        mean: Tensor | None = None

        def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
            value = entropy(outputs, batch)
            self.mean = value.detach() if self.mean is None else 0.9 * self.mean + 0.1 * value.detach()
            return value / self.mean

    return job(Body(), Criterion())


@refused("the loss: got a number drawn by random")
def a_number_of_python() -> Job:
    return job(Body(), lambda outputs, batch: entropy(outputs, batch) * random.random())


@refused(r"the loss: got a gradient for a tensor of shape \(4, 16\) that is not part of the model")
def a_head_outside_of_the_model() -> Job:
    head = nn.Linear(16, 4)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
    return job(model, lambda outputs, batch: entropy(head(outputs), batch))


@refused(r"torch.autograd.grad in the loss, .*losses.py:\d+ ")
def a_gradient_penalty() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.detach().requires_grad_()
            return super().forward(x), x

    def loss(outputs: Any, batch: Any) -> Tensor:
        slope = torch.autograd.grad(outputs[0].sum(), outputs[1], create_graph=True)[0]
        return entropy(outputs[0], batch) + (slope.norm(dim=1) - 1).pow(2).mean()

    return job(Model(), loss)


@trains
def sum_and_count() -> Job:
    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return functional.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])

    return job(Body(), loss, batches())


@refused("calls, which the loss sets")
def a_counter_of_itertools() -> Job:
    calls = itertools.count(1)
    return job(Body(), lambda outputs, batch: entropy(outputs, batch) * next(calls))
