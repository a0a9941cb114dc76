"""Which optimizers may have parts of parameters: by what their steps apply, and by parts against the whole."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import roundelay
from roundelay.errors import JobError
from roundelay.guards.optimizer_checks import check_split, needs_whole

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]
DIMS = {"matrix": 0, "other": 1, "vector": 0}


def named(dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.nn.Parameter]]:
    draws = torch.Generator().manual_seed(0)
    shapes = {"matrix": (36, 40), "other": (36, 40), "vector": (40,)}
    return [(n, torch.nn.Parameter(torch.randn(s, generator=draws, dtype=dtype))) for n, s in shapes.items()]


def made(optimizer: Callable[[Any], torch.optim.Optimizer]) -> roundelay.Job:
    model = torch.nn.Linear(2, 2)
    return roundelay.Job(model=model, loss=lambda o, b: o.mean(), batches=lambda epoch: [], optimizer=optimizer)


def by(update: Update) -> roundelay.Job:
    """A job whose optimizer updates each parameter so: (parameter, gradient, its state)."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["step"] = state.get("step", 0) + 1
                        update(p, p.grad, state)

    return made(lambda given: Own([p for _, p in given]))


def adam(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    m, v = (state.setdefault(key, torch.zeros_like(p)) for key in "mv")
    torch._foreach_lerp_([m], [g], 0.1)
    if not g.is_complex():
        torch._foreach_maximum_([v], 0.0)
    v.mul_(0.95).addcmul_(g, g.conj(), value=0.05)
    p.addcdiv_(m / (1 - 0.9 ** state["step"]), v.abs().sqrt().add_(1e-8), value=-0.1)


def lists(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    past = state.get("past", [torch.zeros_like(p)])
    state["past"] = [g.clone()]
    p.sub_(torch.where((g > 0) & (past[0] > 0), g.clamp(max=1), past[0].sign()), alpha=0.1)


def counted(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    count = state.setdefault("count", torch.zeros(()))
    count += 1
    p.sub_(g, alpha=0.1 / count.item())


def row_mean(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g / (g.square().mean(-1, keepdim=True).sqrt() if p.ndim > 1 else 1.0), alpha=0.1)


def per_head(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_((g.reshape(4, -1) * torch.arange(4.0)[:, None]).view_as(p) if p.ndim > 1 else g, alpha=0.1)


def from_a_size_on(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g / g.norm() if p.ndim > 1 and min(p.shape) >= 32 else g, alpha=0.1)


def product(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g @ g.T @ g if p.ndim > 1 else g, alpha=0.1)


def turned(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g.flip(0) if p.ndim > 1 else g, alpha=0.1)


def from_an_update_on(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g if state["step"] < 5 else g / g.norm(), alpha=0.1)


def clipped(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g * (400 / g.norm()).clamp(max=1), alpha=0.1)


def read_as_a_number(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g, alpha=0.1 if float(g.abs().flatten()[0]) < 1e3 else 0.2)


def norms_of_lists(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g / torch._foreach_norm([g])[0], alpha=0.1)


def noise(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g + torch.randn(p.shape), alpha=0.1)


def rate_by_shape(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g, alpha=0.1 / math.sqrt(p.numel()))


def out_of_torch(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    p.sub_(g, alpha=0.1 / float(abs(g.numpy()).sum()))


def failing(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any]) -> None:
    raise ValueError("not today")


@pytest.mark.parametrize("update", [adam, lists, counted])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_treats_each_element_alone_may_have_parts(update: Update, dtype: torch.dtype) -> None:
    assert needs_whole(by(update), named(dtype), DIMS) == {}


def test_complex_weights_may_have_parts() -> None:
    assert needs_whole(by(adam), named(torch.complex64), DIMS) == {}


MATRICES, ALL = ["matrix", "other"], ["matrix", "other", "vector"]


@pytest.mark.parametrize(
    ("update", "names", "why"),
    [
        (row_mean, MATRICES, "mean"),
        (per_head, MATRICES, "view"),
        (from_a_size_on, MATRICES, "norm"),
        (product, MATRICES, "numpy_T|permute|transpose|t,"),
        (turned, MATRICES, "flip"),
        (from_an_update_on, ALL, "norm"),
        (clipped, ALL, "norm"),
        (read_as_a_number, ALL, "view|select"),
        (norms_of_lists, ALL, "_foreach_norm"),
        (noise, ALL, "another update where it has a part"),
        (rate_by_shape, ALL, "another update where it has a part"),
        (out_of_torch, ALL, "another update where it has a part"),
        (failing, ALL, "could not be tried: ValueError: not today"),
    ],
)
def test_what_looks_at_more_than_an_element_needs_the_whole(update: Update, names: list[str], why: str) -> None:
    found = needs_whole(by(update), named(), DIMS)
    assert sorted(found) == names
    assert all(re.search(why, text) for text in found.values()), found
    with pytest.raises(JobError, match=r"Own: got .* for matrix, other"):
        check_split(by(update), named(), DIMS)


def test_one_number_for_all_parameters_needs_the_whole() -> None:
    class Distance(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            every = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            length = sum(p.grad.abs().sum() for p in every)
            for p in every:
                p.sub_(p.grad / length)

    found = needs_whole(made(lambda given: Distance([p for _, p in given])), named(), DIMS)
    assert sorted(found) == ALL


def test_a_group_of_its_own_is_tried_on_its_own() -> None:
    class Groups(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 0.1, "normed": False})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad / p.grad.norm() if group["normed"] else p.grad, alpha=0.1)

    def grouped(given: Any) -> torch.optim.Optimizer:
        first, *rest = (p for _, p in given)
        return Groups([{"params": [first]}, {"params": rest, "normed": True}])

    assert sorted(needs_whole(made(grouped), named(), DIMS)) == ["other", "vector"]


@pytest.mark.parametrize(
    "make",
    [
        lambda given: torch.optim.SGD([p for _, p in given], lr=0.1, momentum=0.9, fused=True),
        lambda given: torch.optim.AdamW([p for _, p in given], foreach=True),
        lambda given: torch.optim.RMSprop([p for _, p in given], centered=True),
    ],
)
def test_torch_s_own_may_have_parts(make: Any) -> None:
    assert needs_whole(made(make), named(), DIMS) == {}


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_torch_s_own_that_look_at_the_whole_need_it(kind: Any) -> None:
    found = needs_whole(made(lambda given: kind([p for _, p in given if p.ndim == 2])), named(), {"matrix": 0})
    assert sorted(found) == ["matrix"]


def test_a_subclass_is_tried() -> None:
    class Scaled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.std())
            super().step()

    assert sorted(needs_whole(made(lambda given: Scaled([p for _, p in given], lr=0.1)), named(), DIMS)) == ALL
