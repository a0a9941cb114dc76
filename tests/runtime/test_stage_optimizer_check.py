"""An optimizer that computes over all parameters is found before the first update; one that does not is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundelay.errors import JobError
from roundelay.guards.optimizer_checks import check_narrowing
from tests.api.jobs import make

Named = list[tuple[str, nn.Parameter]]
Made = Callable[[Named], torch.optim.Optimizer]

HERE = __file__
AVERAGE: dict[str, torch.Tensor] = {}
NUMBERS = {"calls": 0}


def weights(width: int = 5) -> Named:
    """Of two layers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, width), nn.LayerNorm(width))
    model[1].bias.requires_grad_(False)
    return list(model.named_parameters())


def check(make_optimizer: Made, named: Named | None = None, **how: Any) -> None:
    """On stages that are cut behind the first layer."""
    named = weights() if named is None else named
    names = [name for name, _ in named]
    check_narrowing(make(optimizer=make_optimizer), named, [names[:2], names[2:]], **how)


def hooked(kind: str, hook: Callable[[Named], Callable[..., Any]]) -> Made:
    """SGD with a hook that knows what all is named."""

    def made(named: Named) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
        getattr(optimizer, f"register_step_{kind}_hook")(hook(named))
        return optimizer

    return made


def clipped(named: Named) -> Callable[..., Any]:
    """Global norm clipping."""

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([p for _, p in named], 1.0)

    return clip


def clamped(named: Named) -> Callable[..., Any]:
    """Each gradient alone."""

    def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-1.0, 1.0)

    return clamp


def averaged(named: Named) -> Callable[..., Any]:
    """Of all weights, in a dict that is filled with the optimizer."""
    AVERAGE.update({name: p.detach().clone() for name, p in named})

    def average(optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, p in named:
            AVERAGE[name].lerp_(p.detach(), 0.1)

    return average


def decayed(named: Named) -> Callable[..., Any]:
    """By a norm of all weights, nothing of which stays."""

    def decay(optimizer: Any, args: Any, kwargs: Any) -> None:
        length = sum(float(p.detach().norm()) for _, p in named)
        named[0][1].data.mul_(1 - 0.001 * length)

    return decay


def counted(named: Named) -> Callable[..., Any]:
    """Outside of the optimizer."""

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        NUMBERS["calls"] += 1

    return count


class GlobalNorm(torch.optim.SGD):
    """Clips in its own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Estimating(torch.optim.Optimizer):
    """As Prodigy does: a distance that all gradients enter, which the first updates do not use yet."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, {"lr": 1e-3, "d": 1.0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["d"])
                    group["numerator"] += float(p.grad.abs().sum())
            group["d"] = max(group["d"], group["numerator"] / 1e9)


class Lamb(torch.optim.Optimizer):
    """A trust ratio of each parameter alone."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, {"lr": 1e-2})
        self.counted = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        self.counted += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.sub_(mean, alpha=group["lr"] * float(p.norm() / (mean.norm() + 1e-6)))


class Unlike(torch.optim.SGD):
    """Fails where it has fewer parameters than at first."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.1)
        self.flat = torch.zeros(len(named))

    def step(self, closure: Any = None) -> Any:
        """One update."""
        self.flat.copy_(torch.tensor([float(p.detach().sum()) for p in self.param_groups[0]["params"]]))
        return super().step(closure)


REFUSED: dict[str, tuple[Made, str, str]] = {
    "clipping in a hook": (
        hooked("pre", clipped),
        rf"step pre hook `clip` at {HERE}:\d+: got another",
        "--clip global:",
    ),
    "averages in a hook": (hooked("post", averaged), r"got a step that changes AVERAGE\['0.weight'\]", r"Job\(ema="),
    "others in a hook": (
        hooked("post", decayed),
        r"`decay` at .*reads '1.weight', or its gradient, which it was not given",
        "--workers 1",
    ),
    "a counter outside": (hooked("post", counted), r"changes NUMBERS\['calls'\]", "on_update"),
    "clipping in its step": (
        lambda n: GlobalNorm(n, lr=0.1),
        rf"GlobalNorm with `step` at {HERE}:\d+",
        "--clip global:",
    ),
    "an estimate": (Estimating, r"another value of its group 0:numerator", "estimated rate"),
    "a table of all": (Unlike, r"fails with the parameters of stage 0 alone: RuntimeError", "--workers 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_computed_over_all_parameters_is_refused_by_name(name: str) -> None:
    made, told, remedy = REFUSED[name]
    named = weights()
    before = [p.detach().clone() for _, p in named]
    with pytest.raises(JobError, match=told) as error:
        check(made, named)
    assert remedy.replace("\\", "") in error.value.remedy
    assert NUMBERS["calls"] == 0, "it is tried in a child"
    assert all(torch.equal(p.detach(), b) and p.grad is None for (_, p), b in zip(named, before, strict=True))


@pytest.mark.parametrize("name", ["clipping in a hook", "others in a hook", "an estimate", "clipping in its step"])
def test_one_worker_has_them_all(name: str) -> None:
    named = weights()
    check_narrowing(make(optimizer=REFUSED[name][0]), named, [[n for n, _ in named]])


@pytest.mark.parametrize("name", ["averages in a hook", "a counter outside"])
def test_what_is_kept_outside_is_refused_on_one_worker_too(name: str) -> None:
    named = weights()
    with pytest.raises(JobError, match="no part of the optimizer"):
        check_narrowing(make(optimizer=REFUSED[name][0]), named, [[n for n, _ in named]])


def test_corners_of_a_large_model_show_the_same() -> None:
    with pytest.raises(JobError, match="GlobalNorm"):
        check(REFUSED["clipping in its step"][0], weights(30_000))


class Masked(torch.optim.SGD):
    """Clips, and knows the whole shape of a matrix: corners of it make it fail."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.ndim == 2:
                p.grad.mul_(torch.ones(4, 30_000) if p.shape[0] == 4 else torch.ones(30_000, 4))
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def test_where_corners_fail_the_whole_is_tried() -> None:
    with pytest.raises(JobError, match="Masked"):
        check(lambda named: Masked(named, lr=0.1), weights(30_000))


def of_matrices(named: Named) -> torch.optim.Optimizer:
    """Muon takes matrices only."""
    return torch.optim.Muon([(n, p) for n, p in named if p.ndim == 2], lr=0.01)


def no_decay(named: Named) -> torch.optim.Optimizer:
    """Groups by name."""
    few, many = ([(n, p) for n, p in named if (p.ndim < 2) == yes] for yes in (True, False))
    return torch.optim.AdamW([{"params": many, "lr": 1e-3}, {"params": few, "weight_decay": 0.0}], amsgrad=True)


OWN: dict[str, Made] = {
    name: (lambda kind: lambda named: kind(named, lr=1e-2))(getattr(torch.optim, name))
    for name in ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "Rprop", "Adagrad", "Adadelta", "Adamax", "RMSprop", "ASGD")
}
OWN |= {
    "Adafactor": lambda named: torch.optim.Adafactor(named),
    "Muon": of_matrices,
    "no decay": no_decay,
    "foreach": lambda named: torch.optim.AdamW(named, lr=1e-3, foreach=True),
    "fused": lambda named: torch.optim.AdamW(named, lr=1e-3, fused=True),
    "tensor": lambda named: torch.optim.AdamW(named, lr=torch.tensor(1e-3)),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "clamping": hooked("pre", clamped),
    "lamb": Lamb,
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("width", [5, 30_000])
def test_no_innocent_optimizer_is_refused(name: str, width: int) -> None:
    check(OWN[name], weights(width), always=True)
