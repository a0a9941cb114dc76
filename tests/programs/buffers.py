"""Buffers that a forward replaces, writes or makes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roundelay import Job
from tests.programs.table import Body, batches, entropy, job, refused, trains


@trains
def buffers_of_a_part_replaced_and_written() -> Job:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean = self.mean * 0.9 + h.mean(0) * 0.1
                self.calls += 1
                self.calls = self.calls + 1
            return h - self.mean / (1 + self.calls)

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.centre = Centre()

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.centre(self.first(x)))

    return job(Model())


@trains
def old_value_read_before_it_is_replaced() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) * self.scale  # saved for backward
            self.scale = 0.5 * self.scale + h.detach().abs().mean(0)
            return self.rest(h * self.scale)

    return job(Model())


@trains
def a_queue_in_a_buffer() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(12, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            near = h @ self.queue.clone().detach().t()
            self.queue = torch.cat([h.detach()[:4], self.queue[:-4]])
            return self.rest(h) + near.mean()

    return job(Model())


@trains
def two_buffers_exchanged() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("u", torch.zeros(16))
            self.register_buffer("v", torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            self.u, self.v = self.v, self.u
            return self.rest(self.first(x) + self.u)

    return job(Model())


@trains
def a_buffer_that_the_first_forward_makes() -> Job:
    class Model(Body):
        mean: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", None)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if self.mean is None:
                self.mean = h.detach().mean(0)
            return self.rest(h - self.mean)

    return job(Model())


@refused("buffer 'mean', which the first forward creates.*register_buffer")
def a_buffer_made_by_the_first_forward_and_changed_by_later_ones() -> Job:
    class Model(Body):
        mean: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", None)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            before = torch.zeros(16) if self.mean is None else self.mean
            self.mean = 0.9 * before + 0.1 * h.detach().mean(0)
            return self.rest(h - self.mean)

    return job(Model())


@refused(r"buffer 'model.seen', which the forward replaces, .*buffers.py:\d+ .*shape \(8, 16\)")
def a_buffer_that_changes_its_size() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(0, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.seen = torch.cat([self.seen, h.detach()])[-8:]
            return self.rest(h + self.seen.mean(0))

    return job(Model())


@trains
def a_buffer_written_past_its_data() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if self.training:
                self.mean.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return self.rest(h - self.mean)

    return job(Model())


@trains
def a_buffer_reached_through_a_list() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))
            self.all = [self.mean]

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.all[0].mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return self.rest(h - self.mean)

    return job(Model())


@trains
def a_schedule_that_counts_in_a_buffer() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * torch.clamp(self.calls / 10, max=1.0)

    return job(Model())


@trains
def batch_norm_with_the_mean_of_all_batches() -> Job:
    return job(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU(), nn.Linear(16, 4)))


@trains
def batch_norm_put_in_eval_mode() -> Job:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).train()
    model[1].eval()
    return job(model)


@trains
def quantisation_aware() -> Job:
    from torch.ao import quantization

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(super().forward(self.enter(x)))

    model = Model().train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model, inplace=True)
    return job(model)


@trains
def a_bare_buffer_as_an_output() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return super().forward(x), self.calls

    return job(Model(), lambda outputs, batch: entropy(outputs[0], batch) * (1 + outputs[1]))


@trains
def a_buffer_that_the_loss_reads() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Model()
    return job(model, lambda outputs, batch: entropy(outputs, batch) * (1 + model.calls))


@refused("buffer 'calls' of the model.*Move the write into forward")
def a_buffer_that_the_loss_writes() -> Job:
    model = Body()
    model.register_buffer("calls", torch.zeros(()))

    def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.calls += 1
        return entropy(outputs, batch) * model.calls

    return job(model, loss)


@trains
def codes_moved_by_averages() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(6, 16))
            self.register_buffer("sums", torch.ones(6, 16))
            self.register_buffer("counts", torch.ones(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.first(x)
            nearest = torch.cdist(h, self.codes).argmin(1)
            code = self.codes[nearest]
            with torch.no_grad():
                chosen = nn.functional.one_hot(nearest, 6).float()
                self.counts = 0.9 * self.counts + 0.1 * chosen.sum(0)
                self.sums = 0.9 * self.sums + 0.1 * chosen.t() @ h
                self.codes = self.sums / self.counts.unsqueeze(1)
            return self.rest(h + (code - h).detach()), (code.detach() - h).pow(2).mean()

    return job(Model(), lambda outputs, batch: entropy(outputs[0], batch) + outputs[1], batches())
