"""What people leave in a forward, a loss or a batch: checks, numbers read from tensors, objects, hooks, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional

from roundelay import Job
from tests.programs.table import Body, batches, entropy, job, refused, sgd, trains


class Checked(Body):
    def forward(self, x: Tensor) -> Any:
        assert x.dim() == 2, "two dimensions"
        h = self.first(x)
        assert torch.isfinite(h).all(), "not finite"
        if torch.isnan(h).any() or torch.isinf(h).any():
            raise ValueError("not finite")
        return self.rest(h)


@trains
def asserts_that_numbers_are_finite() -> Job:
    return job(Checked())


@trains
def repairs_numbers_that_are_not_finite() -> Job:
    class Repaired(Body):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            if torch.isinf(h).any():
                h = h.clamp(max=1000.0)
            if not (torch.isfinite(h) & ~torch.isnan(h)).all():
                h = torch.zeros_like(h)
            return self.rest(h)

    return job(Repaired())


@trains
def asserts_what_holds() -> Job:
    class Asserting(Body):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            assert h.abs().max() < 1e6 and not (h < -1).any()  # noqa: PT018  both in one
            return self.rest(h)

    return job(Asserting())


@trains
def asks_by_item() -> Job:
    class Asking(Body):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            if torch.isnan(h).any().item():
                raise ValueError("not a number")
            return self.rest(h)

    return job(Asking())


@refused("no Python branch on tensor values")
def catches_its_own_assertion() -> Job:
    class Catching(Body):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            try:
                assert h.max() < 0.1
            except AssertionError:
                h = h * 0.5
            return self.rest(h)

    return job(Catching())


@refused("Could not guard on data-dependent expression")
def branches_on_a_value() -> Job:
    class Branching(Body):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            if h.mean() > 0.1:
                h = h * 2
            return self.rest(h)

    return job(Branching())


@trains
def reads_a_pointer_as_an_int() -> Job:
    class Queue(Body):
        queue: Tensor
        pointer: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(16, 32))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            scores = h @ self.queue.clone()
            with torch.no_grad():
                at = int(self.pointer)
                self.queue[:, at : at + x.shape[0]] = h.detach().T
                self.pointer[0] = (at + x.shape[0]) % 32
            return self.rest(h) + scores[:, :4]

    return job(Queue())


@trains
def reads_the_longest_length() -> Job:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)

        def forward(self, ids: Tensor, lengths: Tensor) -> Any:
            mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
            h = self.words(ids)[:, : mask.size(1)] * mask.unsqueeze(-1)
            return self.head(h.sum(1) / float(lengths.float().mean()))

    draws, data = torch.Generator().manual_seed(3), []
    for _ in range(6):
        lengths = torch.randint(3, 8, (8,), generator=draws)
        ids, labels = torch.randint(20, (8, 7), generator=draws), torch.randint(4, (8,), generator=draws)
        data.append((ids, lengths, labels))
    return job(Pooled(), lambda outputs, batch: functional.cross_entropy(outputs, batch[2]), data)


@trains
def computes_in_place_with_a_power() -> Job:
    class Powers(Body):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x).add(1.0)
            h.pow_(-0.5)
            return self.rest(h)

    return job(Powers())


@dataclass
class Labelled:
    """A batch that is an object."""

    x: Tensor
    y: Tensor
    name: str = "train"


@trains
def batches_that_are_dataclasses() -> Job:
    data = [Labelled(*batch) for batch in batches()]
    return job(Body(), lambda o, b: functional.cross_entropy(o, b.y), data, inputs=lambda b: ((b.x,), {}))


class Slotted:
    """A batch with slots, one of which holds another object."""

    __slots__ = ("inner", "weight")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.inner, self.weight = Labelled(x, y), torch.ones(len(x))


@trains
def batches_that_hold_objects_in_slots() -> Job:
    def loss(outputs: Any, batch: Any) -> Tensor:
        each = functional.cross_entropy(outputs, batch.inner.y, reduction="none")
        return (each * batch.weight).mean()

    return job(Body(), loss, [Slotted(*batch) for batch in batches()], inputs=lambda b: ((b.inner.x,), {}))


@trains
def a_share_of_mixup() -> Job:
    data = [(x, y, y.flip(0), i / 10) for i, (x, y) in enumerate(batches())]

    def loss(outputs: Any, batch: Any) -> Tensor:
        _, one, other, share = batch
        assert isinstance(share, float)
        return share * functional.cross_entropy(outputs, one) + (1 - share) * functional.cross_entropy(outputs, other)

    return job(Body(), loss, data, inputs=lambda b: ((b[0],), {}))


@trains
def a_number_of_the_batch_that_selects() -> Job:
    data = [{"x": x, "y": y, "epoch": i, "hard": i % 2 == 0} for i, (x, y) in enumerate(batches())]

    def loss(outputs: Any, batch: Any) -> Tensor:
        smoothing = 0.1 * batch["epoch"] if batch["hard"] else 0.0
        return functional.cross_entropy(outputs, batch["y"], label_smoothing=smoothing)

    return job(Body(), loss, data, inputs=lambda b: ((b["x"],), {}))


@trains
def a_share_that_is_whole_at_first() -> Job:
    """An int and a float in turn, each asked for its type, and a branch that reads another field."""
    data = [(x, y, y.flip(0), share) for (x, y), share in zip(batches(), (1, 1, 1, 0.37, 1, 0.2), strict=True)]

    def loss(outputs: Any, batch: Any) -> Tensor:
        _, one, other, share = batch
        if not isinstance(share, int | float):
            share = 0.5
        if share == 1:
            return functional.cross_entropy(outputs, one)
        return share * functional.cross_entropy(outputs, one) + (1 - share) * functional.cross_entropy(outputs, other)

    return job(Body(), loss, data, inputs=lambda b: ((b[0],), {}))


@trains
def a_hash_in_the_batch_that_nobody_reads() -> Job:
    data = [{"x": x, "y": y, "id": 2**70 + i} for i, (x, y) in enumerate(batches())]
    return job(Body(), lambda o, b: functional.cross_entropy(o, b["y"]), data, inputs=lambda b: ((b["x"],), {}))


@refused("neither a tensor nor a number")
def a_number_that_is_too_large_to_be_sent() -> Job:
    data = [{"x": x, "y": y, "id": 2**60 + i} for i, (x, y) in enumerate(batches())]

    def loss(outputs: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch["y"]) * (1 + batch["id"] % 2)

    return job(Body(), loss, data, inputs=lambda b: ((b["x"],), {}))


@refused("neither a tensor nor a number|a use of it in the loss")
def a_string_of_the_batch_that_selects() -> Job:
    data = [{"x": x, "y": y, "task": "ab"[i % 2]} for i, (x, y) in enumerate(batches())]

    def loss(outputs: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch["y"]) * (2 if batch["task"] == "a" else 1)

    return job(Body(), loss, data, inputs=lambda b: ((b["x"],), {}))


@trains
def a_forward_under_autocast() -> Job:
    class Lowered(Body):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.rest(functional.layer_norm(self.first(x), (16,)).softmax(-1))

    return job(Lowered(), lambda outputs, batch: entropy(outputs.float(), batch))


@trains
def a_region_under_autocast_with_one_without_in_it() -> Job:
    class Mixed(Body):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.first(x)
                with torch.autocast("cpu", enabled=False):
                    h = torch.relu(self.b(h.float()))
            return self.c(h)

    return job(Mixed())


@trains
def a_distribution_as_the_result() -> Job:
    class Actor(Body):
        def __init__(self) -> None:
            super().__init__()
            self.log_std = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Any:
            mean = super().forward(x)
            return Independent(Normal(mean, self.log_std.exp().expand_as(mean)), 1), mean.mean(-1)

    def loss(outputs: Any, batch: Any) -> Tensor:
        policy, value = outputs
        return -policy.log_prob(batch[0][:, :4]).mean() - 0.01 * policy.entropy().mean() + value.square().mean()

    return job(Actor(), loss)


@trains
def a_buffer_as_a_part_of_the_result() -> Job:
    class Weighted(Body):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor([1.0, 2.0, 1.0, 1.0]))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.weight

    return job(Weighted(), lambda outputs, batch: functional.cross_entropy(outputs[0], batch[1], weight=outputs[1]))


@trains
def a_metric_of_scikit_learn() -> Job:
    from sklearn.metrics import accuracy_score

    def loss(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"loss": entropy(outputs, batch), "accuracy": accuracy_score(batch[1], outputs.argmax(1))}

    return job(Body(), loss)


@refused("a step that needs a closure: AssertionError: SAM needs one")
def an_optimizer_that_asserts_its_closure() -> Job:
    class Sharpness(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            assert closure is not None, "SAM needs one: a closure"
            return super().step(closure)

    return job(Body(), optimizer=lambda named: Sharpness([p for _, p in named], lr=0.1))


@refused(r"the loss: got None.*where its call has labels")
def a_hugging_face_model_without_labels() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Any:
            return Result(None, super().forward(x))

    return job(Model(), lambda outputs, batch: outputs.loss)


@dataclass
class Result:
    """What such a model returns."""

    loss: Tensor | None
    logits: Tensor


@refused(r"meter.*batches\(epoch\) can read.*return what a meter would keep as a metric")
def a_meter_that_the_loader_prints() -> Job:
    meter = {"loss": 0.0}

    def loss(outputs: Any, batch: Any) -> Tensor:
        result = entropy(outputs, batch)
        meter["loss"] += result.item()
        return result

    def read(epoch: int) -> Any:
        meter["loss"] = 0.0
        return batches()

    return Job(model=Body(), loss=loss, batches=read, optimizer=sgd)
