"""The optimizer's state is predicted without making it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from roundelay.errors import PlanError
from roundelay.planner.plan_options import Choices
from roundelay.planning.examined import Examined
from roundelay.planning.memory_limit import first_allowed, predicted_memory, within_limit
from roundelay.planning.memory_report import optimizer_bytes
from roundelay.planning.planning import capture, fitted
from roundelay.planning.planning import plan as make_plan
from roundelay.session.training import Length, Session
from tests.api.jobs import make
from tests.cli.jobs import mlp

FUSED = (torch.optim.AdamW, torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9))


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("kind", [None, *FUSED], ids=["usual", "adamw", "adam", "sgd"])
def test_what_is_predicted_of_the_optimizer_is_what_it_holds_after_the_run(kind: Any, ema: float) -> None:
    job = make() if kind is None else make(optimizer=lambda named: kind(named, lr=0.01, fused=True))
    captured = capture(job)
    plan = make_plan(job, captured=captured, workers=2, ema=ema)
    predicted = optimizer_bytes(job, captured, fitted(captured, plan), plan)
    assert predicted is not None
    session = Session(job, captured, plan, 0, Length(steps=3))
    held = session.run(notify=lambda event: None).snapshot.optimizer
    by_stage = [
        sum(
            v.numel() * v.element_size()
            for name in stage.parameters
            for v in held[name].values()
            if isinstance(v, torch.Tensor)
        )
        for stage in session.partition.stages
    ]
    assert predicted == by_stage
    assert all(by_stage)


@pytest.mark.parametrize(("predictor", "copies"), [("none", 0), ("improved", 0), ("paper", 1), ("released-code", 1)])
def test_what_prediction_keeps_of_the_last_update_is_counted(predictor: str, copies: int) -> None:
    job = make(optimizer=lambda named: torch.optim.SGD(named, lr=0.1), scheduler=None)
    captured = capture(job)
    plan = make_plan(job, captured=captured, workers=1)
    partition = fitted(captured, plan)
    weights = sum(p.numel() * p.element_size() for p in captured.model.parameters())
    assert optimizer_bytes(job, captured, partition, replace(plan, predictor=predictor)) == [copies * weights]


def test_a_limit_counts_what_a_backward_computes_again() -> None:
    job = make()
    source = Examined(job, capture(job), 0, lambda *_: None)
    plans = [make_plan(job, captured=source.captured, workers=1, recompute=how) for how in ("none", "all")]
    kept, again = (found[0] for plan in plans if (found := predicted_memory(source, plan)))
    assert again.tapes > 0.8 * kept.tapes > 2 * plans[1].stages[0].tape_bytes
    limit = again.total - 1
    with pytest.raises(PlanError, match="memory of worker 0"):
        make_plan(job, captured=source.captured, workers=1, recompute="all", memory_limit=limit)


class Awkward(torch.optim.SGD):
    """A step that looks at values."""

    def step(self, closure: Any = None) -> None:
        """Nothing without memory can be looked at."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and float(p.grad.sum()) > 0:
                    p.data.add_(p.grad, alpha=-0.1)


def test_an_optimizer_that_must_see_values_is_not_predicted() -> None:
    job = make(optimizer=lambda named: Awkward([p for _, p in named], lr=0.1), scheduler=None)
    captured = capture(job)
    plan = make_plan(job, captured=captured, workers=1)
    assert optimizer_bytes(job, captured, fitted(captured, plan), plan) is None
    assert isinstance(captured.model, nn.Module)


class Fixed(nn.Module):
    """A product with a matrix that is not trained: it takes time, and no memory for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


def test_cuts_are_chosen_among_those_that_a_limit_allows() -> None:
    model = nn.Sequential(nn.Linear(6, 512), *[Fixed()] * 24, *[nn.Linear(512, 512) for _ in range(4)])
    job = mlp.make(model=nn.Sequential(model, nn.Linear(512, 3)), optimizer=partial(torch.optim.SGD, lr=0.1))
    planned = partial(make_plan, job, workers=2, rule="1f1b", micro_batches=1)
    last = [planned(memory_limit=limit).stages[1].parameter_bytes for limit in (None, "7MiB")]
    assert last[0] > 4 * 512 * 512 * 4 > last[1]
    with pytest.raises(PlanError, match="by --memory-limit"):
        planned(memory_limit="4MiB")


@pytest.mark.parametrize("more", [{}, {"data_parallel": 2}, {"recompute": "all"}, {"rule": "pipedream"}], ids=str)
def test_a_plan_is_not_refused_where_another_cut_is_allowed(more: Any) -> None:
    """The estimate by which cuts are chosen is none of what is held; the limit is."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *[nn.Linear(16, 16) for _ in range(3)], nn.Linear(16, 3))
    planned = partial(make_plan, mlp.make(model=model), workers=2, **{"rule": "1f1b", **more})
    source = Examined(mlp.make(model=model), capture(mlp.make(model=model)), 0, lambda *_: None)
    names = ("linear", "tanh", "linear_1", "linear_2", "linear_3")

    def held(plan: Any) -> int:
        found = predicted_memory(source, plan)
        assert found is not None
        return max(one.total for one in found)

    least = min(held(planned(cuts=name)) for name in names)
    assert held(planned(memory_limit=least)) == least


def test_the_fastest_cuts_are_tried_first_and_each_once() -> None:
    assert [one.memory_limit for one in within_limit(Choices(memory_limit=100))] == [None, 100, 114, 85, 70]
    assert [one.cuts for one in within_limit(Choices(memory_limit=100, cuts="linear"))] == ["linear"]
    made: list[str] = []

    def make(what: str) -> str:
        made.append(what)
        if what != "third":
            raise PlanError(what, got="too much", expected="less", remedy="None.")
        return what

    tries = [(what, partial(make, what)) for what in ("first", "second", "first", "third", "fourth")]
    assert first_allowed(tries) == "third"
    assert made == ["first", "second", "third"]
    with pytest.raises(PlanError, match="second"):
        first_allowed(tries[:3])
