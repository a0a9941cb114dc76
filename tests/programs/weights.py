"""Weights that are reached, tied or handed out in unusual ways."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from roundelay import Job
from tests.programs.table import Body, batches, entropy, job, refused, trains, trains_but_for_rounding


@trains
def weights_in_a_list() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.randn(16, 8) * 0.3), nn.Parameter(torch.randn(16, 16) * 0.3)
            self.all = [self.w1, self.w2]

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.all:
                x = torch.relu(functional.linear(x, weight))
            return self.c(x)

    return job(Model())


@trains
def weights_in_a_partial_a_dict_and_a_plain_object() -> Job:
    class Holder:
        pass

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor([0.25]))
            self.act = functools.partial(functional.prelu, weight=self.slope)
            self.holder: Any = Holder()
            self.holder.weights = {"b": self.b.weight}

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.act(functional.linear(self.act(self.a(x)), self.holder.weights["b"])))

    return job(Model())


@trains
def a_weight_behind_a_property() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Parameter(torch.randn(16, 16) * 0.3)

        @property
        def skew(self) -> Tensor:
            return self.part - self.part.t()

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.first(x) @ self.skew)

    return job(Model())


@trains
def views_of_weights_kept_from_the_beginning() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16) * 0.3)
            self.turned, self.row, self.flat, self.still = self.w.t(), self.w[3], self.w.view(-1), self.w.detach()

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.first(x) @ self.turned + self.row + self.flat.mean() + self.still.mean(0))

    return job(Model())


@trains_but_for_rounding
def two_weights_in_one_memory() -> Job:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[4].weight.data = model[0].weight.data

    return job(model, data=batches(classes=8))


@refused(
    "parameters '0.weight' and '4.weight': got two parameters that share memory, which Adam steps.*model.4.weight = "
)
def two_weights_in_one_memory_under_adam() -> Job:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[4].weight.data = model[0].weight.data
    return job(model, data=batches(classes=8), optimizer=lambda named: torch.optim.Adam(named, lr=0.01))


@refused("parameters 'flat' and 'part': got two different views of the same memory")
def two_weights_that_overlap() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.randn(64))
            self.part = nn.Parameter(torch.empty(16))
            self.part.data = self.flat.data[:16]

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.first(x) + self.part + self.flat[16:32])

    return job(Model())


@trains
def tied_weights() -> Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(self.embed(x))).mean(1))

    return job(Model(), data=batches(5, words=20, classes=20))


@trains
def a_layer_called_twice() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.rest(torch.relu(self.b(self.first(x))))

    return job(Model())


@trains
def weights_that_nobody_registered() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.free, self.parts = [nn.Parameter(torch.randn(16))], [nn.Linear(16, 16)]

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(torch.relu(self.parts[0](self.first(x)) + self.free[0]))

    return job(Model())


@trains
def a_bare_weight_as_an_output() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.log_var = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.log_var

    def loss(outputs: Any, batch: Any) -> Tensor:
        logits, log_var = outputs
        return (-log_var[0]).exp() * entropy(logits, batch) + (-log_var[1]).exp() * logits.pow(2).mean() + log_var.sum()

    return job(Model(), loss)


@trains
def a_frozen_layer() -> Job:
    model = Body()
    model.a.requires_grad_(False)
    return job(model)


@trains
def weight_norm() -> Job:
    model = Body()
    parametrizations.weight_norm(model.b)
    return job(model)


@trains
def weight_norm_by_hooks() -> Job:
    model = Body()
    torch.nn.utils.weight_norm(model.b)
    return job(model)


@trains
def spectral_norm() -> Job:
    model = Body()
    parametrizations.spectral_norm(model.b)
    return job(model)


@trains
def spectral_norm_by_hooks() -> Job:
    model = Body()
    torch.nn.utils.spectral_norm(model.b)
    return job(model)


@refused(r"parameter 'b.weight', which the model's forward writes into, .*weights.py:\d+ ")
def a_weight_clamped_in_forward() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            self.b.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    return job(Model())


@refused(r"an assignment to .data in the model's forward, .*weights.py:\d+ `self.b.weight.data = ")
def a_weight_that_gets_other_data() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            self.b.weight.data = self.b.weight.data * 0.99
            return super().forward(x)

    return job(Model())


@trains
def data_read_as_detached() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.rest(h / (1 + h.data.norm(dim=1, keepdim=True)))

    return job(Model())


@trains
def in_double_precision() -> Job:
    return job(Body().double(), data=[(x.double(), y) for x, y in batches()])


@trains
def in_bfloat16() -> Job:
    return job(Body().bfloat16(), data=[(x.bfloat16(), y) for x, y in batches()])
