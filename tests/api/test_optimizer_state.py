"""State that optimizers keep in groups, in attributes and in optimizers that they wrap: trained, saved, resumed."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import CheckpointError
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.optimizer.optimizer_state import WHOLE, OptimizerState
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, narrow
from tests.api.jobs import make
from tests.checkpoint.whole import save
from tests.resume.cuts import every_checkpoint

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
    ("kind", "transport"), [*((kind, "memory") for kind in KINDS), ("lookahead", "shm"), ("two in one", "shm")]
)
def test_eight_updates_are_four_and_four_more_on_other_workers_too(kind: str, transport: str, tmp_path: Path) -> None:
    plan = planned(kind, transport=transport)
    whole = roundelay.train(job(kind), plan=plan, steps=8)
    roundelay.train(job(kind), plan=plan, steps=4, save_to=tmp_path / "run")
    assert_equal(roundelay.train(job(kind), plan=plan, steps=4, resume=tmp_path / "run"), whole)
    for workers in (1, 3):
        other = planned(kind, workers=workers)
        assert_equal(roundelay.train(job(kind), plan=other, steps=4, resume=tmp_path / "run"), whole)
    assert roundelay.verify(job(kind), plan=plan, steps=2, resume=tmp_path / "run").equal


@pytest.mark.parametrize("kind", KINDS)
def test_so_they_are_in_mid_flight(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(kind, "pipeoptim")
    with every_checkpoint(monkeypatch, tmp_path):
        whole = roundelay.train(job(kind), plan=plan, steps=8, save_to=tmp_path / "run", checkpoint_every=1)
    assert load(tmp_path / "4").flight is not None
    assert_equal(roundelay.train(job(kind), plan=plan, steps=4, resume=tmp_path / "4"), whole)
    assert roundelay.verify(job(kind), plan=plan, steps=2, resume=tmp_path / "4").equal


def test_only_what_a_step_writes_is_kept_of_a_group(tmp_path: Path) -> None:
    def scheduled(lr: float, kind: Any = torch.optim.AdamW) -> roundelay.Job:
        halved = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        return job("lookahead", optimizer=lambda named: kind(named, lr=lr), scheduler=halved)

    plan = planned("lookahead")
    roundelay.train(scheduled(1.0), plan=plan, steps=2, save_to=tmp_path / "run")
    assert WHOLE not in load(tmp_path / "run").optimizer
    rest = roundelay.train(scheduled(4.0), plan=plan, steps=2, resume=tmp_path / "run")
    assert [update.learning_rates for update in rest.updates] == [(1.0,), (0.5,)]
    written = roundelay.train(job("counter in the group"), plan=plan, steps=2, save_to=tmp_path / "written")
    told = load(tmp_path / "written").optimizer[WHOLE]
    assert told == written.snapshot.optimizer[WHOLE]
    assert told == {" group 0:k": 2, " group 0:lr": 0.025, " group 1:k": 2, " group 1:lr": 0.025}


def test_an_optimizer_that_does_not_wrap_what_the_checkpoint_s_did_is_refused() -> None:
    named = list(small().named_parameters())
    for made, other in (("lookahead", "forwarding"), ("two in one", "forwarding")):
        one, two = (build_optimizer(KINDS[kind], named) for kind in (made, other))
        kept = OptimizerState(one, named)
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        with kept.stepping():
            one.step()
        told = kept.entries(dict(named))
        again = build_optimizer(KINDS[made], named)
        OptimizerState(again, named).restore(dict(named), told)
        found = OptimizerState(again, named)
        found.changed |= kept.changed
        assert found.entries(dict(named)).keys() == told.keys()
        with pytest.raises(CheckpointError, match="the optimizer of the resumed run"):
            OptimizerState(two, named).restore(dict(named), told)
        for _, parameter in named:
            parameter.grad = None


def test_groups_of_wrapped_optimizers_are_narrowed_to_the_stage() -> None:
    named = list(small().named_parameters())
    optimizer: Any = build_optimizer(TwoInOne, named)
    narrow(optimizer, dict(named[:2]), named)
    weight, bias = (parameter for _, parameter in named[:2])
    held = [group["params"] for one in (optimizer, *optimizer.inner) for group in one.param_groups]
    assert [[id(p) for p in params] for params in held] == [[id(weight)], [id(bias)]] * 2


def test_verify_from_a_checkpoint_compares_with_a_run_that_was_never_interrupted(tmp_path: Path) -> None:
    plan = planned("counter in the group")
    roundelay.train(job("counter in the group"), plan=plan, steps=4, save_to=tmp_path / "run")
    found = roundelay.verify(job("counter in the group"), plan=plan, steps=2, resume=tmp_path / "run")
    assert (found.equal, found.begins, found.steps, found.losses) == (True, 0, 2, 2)
    start = load(tmp_path / "run")
    lost = {name: state for name, state in start.optimizer.items() if name != WHOLE}
    save(tmp_path / "lost", dataclasses.replace(start, optimizer=lost), {})
    found = roundelay.verify(job("counter in the group"), plan=plan, steps=2, resume=tmp_path / "lost")
    assert not found.equal
    assert "update 4 differs" in found.difference


@pytest.mark.parametrize(
    "what", ["another plan", "another rate", "another option", "other weights", "a rule that drains"]
)
def test_else_the_reference_begins_with_the_checkpoint(what: str, tmp_path: Path) -> None:
    def made(lr: float = 0.1, eps: float = 1e-8) -> roundelay.Job:
        return job("forwarding", optimizer=lambda named: torch.optim.Adam(named, lr=lr, eps=eps))

    rule = "pipeoptim" if what == "a rule that drains" else "1f1b"
    plan = planned("forwarding", rule)
    roundelay.train(made(), plan=plan, steps=4, save_to=tmp_path / "run")
    then = made(0.2 if what == "another rate" else 0.1, 1e-3 if what == "another option" else 1e-8)
    if what == "another plan":
        plan = planned("forwarding", clip="stage:0.1")
    if what == "other weights":
        nn.init.zeros_(then.model.get_parameter("0.weight"))
    found = roundelay.verify(then, plan=plan, steps=2, resume=tmp_path / "run")
    assert (found.equal, found.begins) == (True, 4)
