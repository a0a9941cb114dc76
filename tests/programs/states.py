"""What a forward keeps from call to call in Python, and what changes a model from outside."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundelay import Job
from tests.programs.table import Body, batches, entropy, job, refused, sgd


@refused(r"model.calls, which the forward sets, .*states.py:\d+ `self.calls \+= 1`: got a state.*register_buffer")
def a_counter() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * min(1.0, self.calls / 10)

    return job(Model())


@refused(r"model.calls, which the forward sets")
def a_counter_that_matters_late() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (2.0 if self.calls > 2000 else 1.0)

    return job(Model())


CALLS = 0


@refused("CALLS, which the forward sets, .*: got a state")
def a_counter_of_the_file() -> Job:
    global CALLS
    CALLS = 0

    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            global CALLS
            CALLS += 1
            return super().forward(x) * CALLS

    return job(Model())


@refused(r"model.calls, which the forward sets, .*states.py:\d+ `Model.calls \+= 1`")
def a_counter_of_the_class() -> Job:
    class Model(Body):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Model.calls += 1
            return super().forward(x) * Model.calls

    return job(Model())


@refused("model.ready, which the forward sets")
def a_flag_of_the_first_call() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.ready = False

        def forward(self, x: Tensor) -> Tensor:
            factor = 1.0 if self.ready else 3.0
            self.ready = True
            return super().forward(x) * factor

    return job(Model())


@refused(r"model.h, which the forward sets, .*states.py:\d+ `self.h = .*register_buffer\(\"h\"")
def a_hidden_state_in_an_attribute() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.zeros(16)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x) + self.h)
            self.h = h.mean(0).detach()
            return self.rest(h)

    return job(Model())


@refused("model.memory, which the forward sets")
def a_memory_in_a_list() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.memory: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            before = torch.stack(self.memory).mean(0) if self.memory else torch.zeros(16)
            self.memory.append(h.detach().mean(0))
            self.memory = self.memory[-3:]
            return self.rest(h + before)

    return job(Model())


@refused("model.memory, which the forward sets")
def a_memory_in_a_deque() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.memory: deque[Tensor] = deque(maxlen=3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.memory.append(h.detach().mean(0))
            return self.rest(h + sum(self.memory))

    return job(Model())


@refused(r"torch.randn in the model's forward, .*states.py:\d+ .*torch.Generator of its own")
def a_generator_of_torch() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.draws = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.rest(h + 0.5 * torch.randn(h.shape, generator=self.draws))

    return job(Model())


@refused("model.draws, which the forward sets.*: got a random number generator of its own")
def a_generator_of_numpy() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.draws = np.random.default_rng(0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(self.draws.random())

    return job(Model())


@refused(r"torch.manual_seed in the model's forward, .*states.py:\d+ `torch.manual_seed\(5\)`")
def a_seed() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(5)
            return self.rest(self.first(x) + torch.randn(16))

    return job(Model())


@refused("the model's forward: got a number drawn by random")
def a_number_of_python() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + random.random())

    return job(Model())


@refused(r"model.tau, changed by the job while it trains .*got \d\.0; expected 1\.0")
def a_temperature_that_the_loader_changes() -> Job:
    class Model(Body):
        tau = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(torch.tanh(self.a(x) * self.tau))

    model, data = Model(), batches()
    model.tau = 1.0

    def changing(epoch: int) -> Iterator[Any]:
        for i, batch in enumerate(data):
            model.tau = 1.0 + i
            yield batch

    return Job(model=model, loss=entropy, batches=changing, optimizer=sgd)


@refused("model.a.weight.requires_grad, changed by the job while it trains.*--from RUN")
def a_layer_unfrozen_in_the_second_epoch() -> Job:
    model, data = Body(), batches(count=2)
    model.a.requires_grad_(False)

    def unfreezing(epoch: int) -> Any:
        model.a.requires_grad_(epoch > 0)
        return data

    return Job(model=model, loss=entropy, batches=unfreezing, optimizer=lambda n: torch.optim.SGD(n, lr=0.1))
