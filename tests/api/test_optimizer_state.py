"""State that optimizers keep in groups, in attributes and in optimizers that they wrap, through checkpoint and resume."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundelay
from roundelay.errors import CheckpointError
from roundelay.observe.checkpoint import load
from roundelay.runtime.kept_state import WHOLE, Kept
from roundelay.runtime.optimizer import build_optimizer, narrow
from roundelay.runtime.reader import Extent, read_batches
from tests.api.jobs import make

Named = list[tuple[str, nn.Parameter]]


class InGroup(torch.optim.SGD):
    """Counts its steps in the group, and sets the learning rate by it."""

    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 * min(1.0, group["k"] / 8)
        return super().step(closure)


class InAttribute(torch.optim.SGD):
    """Counts its steps in an attribute, keeps a tensor in another, and its velocities in a dict of its own."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.05)
        self.steps = 0
        self.seen: dict[str, Any] = {"sums": [torch.zeros(()), 0.5]}
        self.velocities: dict[nn.Parameter, Tensor] = {}
        self.places = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        self.held = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        self.steps += 1
        self.seen["sums"][0] += 1 / self.steps
        for p, place in zip(self.held, self.places, strict=True):
            if p.grad is not None:
                self.velocities.setdefault(p, torch.zeros_like(p)).lerp_(p.grad, 0.5)
                place.add_(p.grad)
                p.sub_(self.velocities[p] / self.steps + 0.01 * float(self.seen["sums"][0]) * place)


class Lookahead(torch.optim.Optimizer):
    """As published: it shares the groups of the optimizer that it wraps, and has a state of its own."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 3) -> None:
        self.optimizer, self.k = base, k
        self.param_groups = base.param_groups
        self.state: Any = defaultdict(dict)
        self.fast_state = base.state
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        result = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    slow = self.state[fast].setdefault("slow", fast.detach().clone())
                    slow.add_(fast.detach() - slow, alpha=0.5)
                    fast.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.k
        return result


class TwoInOne(torch.optim.Optimizer):
    """Matrices by one optimizer, the rest by another, under groups of its own."""

    def __init__(self, named: Named) -> None:
        matrices, others = ([p for _, p in named if (p.ndim == 2) == yes] for yes in (True, False))
        self.inner = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=1e-2)]
        super().__init__([{"params": matrices, "lr": 0.1}, {"params": others, "lr": 1e-2}], {})

    def step(self, closure: Any = None) -> None:
        """One update."""
        for one in self.inner:
            one.step()


class Forwarding(torch.optim.Optimizer):
    """As accelerators wrap one: what it shows is the other's."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.optimizer = base

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The other's."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The other's."""
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """The other's."""
        return self.optimizer.step(closure)


class ScheduleFree(torch.optim.Optimizer):
    """Averages by weights that it sums in the group; evaluates with another point than it trains."""

    def __init__(self, named: Named, lr: float = 0.05) -> None:
        super().__init__(named, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True})

    @torch.no_grad()
    def _turned(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.1 if train else 1 - 1 / 0.9)
                group["train_mode"] = train

    def train(self) -> None:
        """Weights to train."""
        self._turned(True)

    def eval(self) -> None:
        """Weights to evaluate."""
        self._turned(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            lr = group["lr"] * min(1.0, (group["k"] + 1) / 5)
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += (weight := group["lr_max"] ** 2)
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, weight / group["weight_sum"])
                    p.sub_(p.grad, alpha=lr * 0.1)
                    z.sub_(p.grad, alpha=lr)
            group["k"] += 1


def by_name(named: Named, of: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Two groups."""
    biases, others = ([(n, p) for n, p in named if n.endswith("bias") == yes] for yes in (True, False))
    return of([{"params": others}, {"params": biases, "weight_decay": 0.0}], **options)


KINDS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "counter in the group": lambda named: by_name(named, InGroup, lr=0.1, momentum=0.9),
    "counter in an attribute": InAttribute,
    "lookahead": lambda named: Lookahead(by_name(named, torch.optim.AdamW, lr=1e-2)),
    "two in one": TwoInOne,
    "forwarding": lambda named: Forwarding(torch.optim.Adam(named, lr=1e-2)),
    "schedule-free": ScheduleFree,
}


def small() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))


def job(kind: str, **changes: Any) -> roundelay.Job:
    """On five batches an epoch."""
    return make(small(), **({"optimizer": KINDS[kind], "scheduler": None} | changes))


def planned(kind: str, rule: str = "1f1b", **more: Any) -> roundelay.Plan:
    """For two workers, cut in the middle, so that either has matrices and biases."""
    return roundelay.plan(job(kind), **{"workers": 2, "rule": rule, "micro_batches": 1, "cuts": "equal", **more})


def assert_equal(ours: roundelay.Trained, others: roundelay.Trained) -> None:
    """Weights and all that the optimizer keeps, bit for bit."""
    for name, weight in others.snapshot.parameters.items():
        assert torch.equal(ours.snapshot.parameters[name], weight), name
    assert ours.snapshot.optimizer.keys() == others.snapshot.optimizer.keys()
    for name, state in others.snapshot.optimizer.items():
        assert ours.snapshot.optimizer[name].keys() == state.keys()
        for key, value in state.items():
            mine = ours.snapshot.optimizer[name][key]
            assert torch.equal(mine, value) if isinstance(value, Tensor) else mine == value, (name, key)


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_plain_pytorch_does(kind: str) -> None:
    plain = job(kind)
    optimizer = plain.optimizer(list(plain.model.named_parameters()))
    for batch in read_batches(plain.batches, 0, Extent(batches=5)):
        plain.loss(plain.model(batch[0]), batch).backward()
        optimizer.step()
        for parameter in plain.model.parameters():
            parameter.grad = None
    ours = roundelay.train(job(kind), plan=planned(kind), steps=5)
    for name, weight in plain.model.named_parameters():
        assert torch.equal(ours.snapshot.parameters[name], weight.detach()), name


@pytest.mark.parametrize(
    ("rule", "transport", "kinds"),
    [("1f1b", "memory", KINDS), ("pipeoptim", "memory", KINDS), ("1f1b", "shm", ["lookahead", "counter in an attribute"])],
)
def test_what_it_keeps_survives_a_checkpoint(rule: str, transport: str, kinds: Any, tmp_path: Path) -> None:
    for kind in kinds:
        plan = planned(kind, rule, transport=transport)
        if rule == "1f1b":
            whole = roundelay.train(job(kind), plan=plan, steps=8)
            roundelay.train(job(kind), plan=plan, steps=4, save_to=tmp_path / kind)
        else:  # a checkpoint in mid-flight is that of a run that goes on
            seen: list[Any] = []
            whole = roundelay.train(job(kind), plan=plan, steps=8, save_to=tmp_path / kind, checkpoint_every=4,
                                    on_update=seen.append)  # fmt: skip
            continue
        rest = roundelay.train(job(kind), plan=plan, steps=4, resume=tmp_path / kind)
        assert_equal(rest, whole)
        assert roundelay.verify(job(kind), plan=plan, steps=2, resume=tmp_path / kind).equal, kind
