"""Optimizers that people have: groups of which a stage has nothing, another one than the checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import roundelay
from roundelay.errors import CheckpointError, JobError
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.optimizer.nested_state import flatten, same_value, unflatten
from tests.api.jobs import make


class Looking(torch.optim.SGD):
    """Looks at each group's first parameter, and asks for its device and its norm, as LARS and others do."""

    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            assert group["params"][0].device.type == "cpu"
            assert float(group["params"][0].detach().norm()) >= 0.0
        return super().step(closure)


def small() -> torch.nn.Module:
    """The same weights each time."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def grouped(named: Any) -> torch.optim.Optimizer:
    """A group for each layer, so that each of two stages has nothing of one."""
    head, body = ([p for name, p in named if name.startswith("2") == yes] for yes in (True, False))
    return Looking([{"params": body}, {"params": head, "lr": 0.01}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_group_of_which_a_stage_has_nothing_is_not_empty_to_its_optimizer(scheduled: bool) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda u: 0.9**u, lambda u: 0.5**u])

    def job() -> roundelay.Job:
        return make(small(), optimizer=grouped, scheduler=schedule if scheduled else None)

    plan = roundelay.plan(job(), workers=2, rule="1f1b", micro_batches=1, cuts="tanh")
    ours = roundelay.train(job(), plan=plan, steps=5)
    plain = job()
    optimizer = plain.optimizer(list(plain.model.named_parameters()))
    scheduler = plain.scheduler(optimizer) if plain.scheduler is not None else None
    for batch in read_batches(plain.batches, 0, Extent(batches=5)):
        plain.loss(plain.model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    for name, weight in plain.model.named_parameters():
        assert torch.equal(ours.snapshot.parameters[name], weight.detach()), name
    assert roundelay.verify(job(), plan=plan, steps=5).equal


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.div_(p.grad.norm())
        return super().step(closure)


def test_a_plan_with_parts_of_states_is_refused_for_an_optimizer_that_looks_at_the_whole() -> None:
    plan = roundelay.plan(make(small(), optimizer=sgd), data_parallel=2, zero=1, workers=1, rule="1f1b")
    other = make(small(), optimizer=lambda named: Normed(named, lr=0.1, momentum=0.9))
    with pytest.raises(JobError, match=r"Normed: got a step that applies .*norm.* of each a worker has a part"):
        roundelay.train(other, plan=plan, steps=2)


def sgd(named: Any) -> torch.optim.Optimizer:
    """With a state."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def plain_sgd(named: Any) -> torch.optim.Optimizer:
    """Without one."""
    return torch.optim.SGD(named, lr=0.1)


def adam(named: Any) -> torch.optim.Optimizer:
    """Another."""
    return torch.optim.Adam(named, lr=1e-3)


def adamw(named: Any) -> torch.optim.Optimizer:
    """One that is an Adam."""
    return torch.optim.AdamW(named, lr=1e-3)


@pytest.mark.parametrize(("first", "then", "works"), [(sgd, adam, False), (plain_sgd, adam, True), (adam, adamw, True)])
def test_another_optimizer_than_the_checkpoint_s_is_refused_by_name_unless_its_state_fits(
    first: Any, then: Any, works: bool, tmp_path: Path
) -> None:
    def job(optimizer: Any) -> roundelay.Job:
        return make(optimizer=optimizer, scheduler=None)

    plan = roundelay.plan(job(first), workers=2, rule="1f1b", cuts="equal")
    roundelay.train(job(first), plan=plan, steps=2, save_to=tmp_path / "run")
    if works:
        assert len(roundelay.train(job(then), plan=plan, steps=2, resume=tmp_path / "run").updates) == 2
        return
    with pytest.raises(CheckpointError, match="Adam, but a checkpoint of SGD, with momentum_buffer") as told:
        roundelay.train(job(then), plan=plan, steps=2, resume=tmp_path / "run")
    assert "roundelay.load(model, RUN)" in told.value.remedy


class Preconditioned(torch.optim.Optimizer):
    """Keeps, as Shampoo and SOAP do, a list of matrices for each parameter, and a dict of more."""

    def __init__(self, named: Any, lr: float = 0.05) -> None:
        super().__init__(named, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["GG"] = [torch.eye(size) for size in p.shape]
                    state["more"] = {"mean": torch.zeros_like(p), "counts": (0, [1.5])}
                state["more"]["counts"] = (state["more"]["counts"][0] + 1, [1.5])
                state["more"]["mean"].lerp_(p.grad, 0.1)
                moved = p.grad
                for axis, matrix in enumerate(state["GG"]):
                    matrix.lerp_(torch.tensordot(p.grad, p.grad, [[d for d in range(p.ndim) if d != axis]] * 2), 0.1)
                    moved = torch.tensordot(moved, torch.linalg.inv(matrix), [[0], [0]])
                p.sub_(moved.clamp(-1, 1) + state["more"]["mean"], alpha=group["lr"])


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_lists_and_dicts_in_a_state_are_proved_saved_and_resumed(transport: str, tmp_path: Path) -> None:
    def job() -> roundelay.Job:
        return make(small(), optimizer=Preconditioned, scheduler=None)

    plan = roundelay.plan(job(), workers=2, rule="1f1b", transport=transport, cuts="equal")
    assert roundelay.verify(job(), plan=plan, steps=4).equal
    whole = roundelay.train(job(), plan=plan, steps=6)
    roundelay.train(job(), plan=plan, steps=3, save_to=tmp_path / "run")
    rest = roundelay.train(job(), plan=plan, steps=3, resume=tmp_path / "run")
    for name, weight in whole.snapshot.parameters.items():
        assert torch.equal(rest.snapshot.parameters[name], weight), name
    assert roundelay.verify(job(), plan=plan, steps=2, resume=tmp_path / "run").equal


def test_a_nested_state_is_the_same_again() -> None:
    state = {"a": [torch.ones(2), (1, None, "x#1")], "b": {"c": torch.zeros(1), "d": []}, "a#7": 3, "t": torch.ones(1)}
    flat = flatten(state)
    assert not any(isinstance(value, (list, tuple, dict)) for value in flat.values())
    again = unflatten(flat)
    assert again["a"][1] == (1, None, "x#1")
    assert torch.equal(again["a"][0], torch.ones(2))
    assert again["b"]["d"] == []
    assert again["a#7"] == 3
    assert again.keys() == state.keys()


@pytest.mark.parametrize("value", [{1: 2}, object(), [object()]])
def test_what_cannot_be_kept_is_told_by_its_name(value: Any) -> None:
    with pytest.raises(JobError, match=r"its state 'odd'"):
        flatten({"odd": value})


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([0.0, float("nan")]), torch.tensor([float("nan"), 0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor(1.0), False),
        (torch.tensor(1.0), 1.0, False),
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        (None, None, True),
    ],
)
def test_values_are_the_same_by_type_shape_and_content(one: object, two: object, same: bool) -> None:
    assert same_value(one, two) is same
