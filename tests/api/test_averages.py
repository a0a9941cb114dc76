"""Averages of weights: bit-equal to torch's own, proved like the rest, resumed, saved, evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import roundelay
from roundelay.errors import CheckpointError, PlanError
from roundelay.ir.averages import EMA, EVALUATED
from roundelay.ir.rule import rules
from roundelay.planning.planning import capture
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.session.checkpointing import Saving
from roundelay.session.resume import load_checkpoint
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session
from tests.api.jobs import make, mlp
from tests.resume.cuts import every_checkpoint

DECAY = 0.9
STEPS = 7


class ScheduleFree(torch.optim.Optimizer):
    """Averaging without a schedule: trains at y = 0.1 z + 0.9 x, evaluates at x, the mean of all z."""

    def __init__(self, named: Any, lr: float = 0.05) -> None:
        super().__init__(named, {"lr": lr, "training": False})

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].get("z")
                if z is not None and group["training"] != training:
                    p.lerp_(z, 0.1 if training else -0.1 / 0.9)
            group["training"] = training

    def train(self) -> None:
        """To the weights that gradients are computed at."""
        self._move(True)

    def eval(self) -> None:
        """To the weights that are evaluated."""
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call optimizer.train() first")
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"], state["x"], state["k"] = p.clone(), p.clone(), 0
                state["k"] += 1
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / state["k"])
                p.copy_(state["x"]).lerp_(state["z"], 0.1)


def averages(trained: Any, key: str = EMA) -> dict[str, Tensor]:
    """What a run's last snapshot holds of them."""
    return {name: state[key] for name, state in trained.snapshot.optimizer.items() if key in state}


def small() -> torch.nn.Module:
    """The same weights each time."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))


def plain() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and averages of the loop that everybody writes, with torch's own average."""
    job = make(small())
    model = job.model
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)  # torch begins with a copy at the first call; ours is the first weights
    optimizer = job.optimizer(list(model.named_parameters()))
    scheduler = None if job.scheduler is None else job.scheduler(optimizer)
    for batch in read_batches(job.batches, 0, Extent(batches=STEPS)):
        job.loss(model(batch[0]), batch).backward()
        optimizer.step()
        averaged.update_parameters(model)
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), dict(averaged.module.named_parameters())


def test_averages_equal_torchs_own_bit_for_bit() -> None:
    weights, expected = plain()
    job = make(small())
    plan = roundelay.plan(job, workers=2, rule="1f1b", micro_batches=1, ema=DECAY, cuts="equal")
    trained = roundelay.train(job, plan=plan, steps=STEPS)
    for name, weight in weights.items():
        assert torch.equal(trained.snapshot.parameters[name], weight.detach()), name
    found = averages(trained)
    assert found.keys() == expected.keys()
    for name, average in expected.items():
        assert torch.equal(found[name], average.detach()), name
        assert not torch.equal(found[name], trained.snapshot.parameters[name])


@pytest.mark.parametrize("rule", [rule.name for rule in rules() if rule.name != "zb-v"])
def test_averages_are_proved_under_every_rule(rule: str) -> None:
    plan = roundelay.plan(make(), workers=2, rule=rule, ema=DECAY, cuts="equal")
    assert roundelay.verify(make(), plan=plan, steps=4).equal


def test_an_average_that_misses_an_update_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundelay.runtime.optimizer.weight_averages import WeightAverages

    real, calls = WeightAverages.update, list[int]()

    def misses(self: WeightAverages) -> None:
        calls.append(1)
        if len(calls) != 3:
            real(self)

    monkeypatch.setattr(WeightAverages, "update", misses)
    plan = roundelay.plan(make(), workers=2, rule="1f1b", ema=DECAY, cuts="equal")
    result = roundelay.verify(make(), plan=plan, steps=4)
    assert not result.equal
    assert EMA in result.difference


def test_a_run_that_goes_on_has_the_averages_of_one_that_was_never_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = roundelay.plan(make(), workers=2, rule="pipeoptim", transport="shm", ema=DECAY, cuts="equal")
    roundelay.train(make(), plan=plan, steps=4, save_to=tmp_path / "a", checkpoint_every=3)
    whole = averages(roundelay.train(make(), plan=plan, steps=8, save_to=tmp_path / "whole"))
    job = make()
    with every_checkpoint(monkeypatch, tmp_path / "each"):
        Session(job, capture(job), plan, 0, Length(steps=8)).run(saving=Saving(path=tmp_path / "b", every=3))
    job = make()
    captured = capture(job)
    start = load_checkpoint(tmp_path / "each" / "3", captured)
    assert start.flight is not None
    rest = Session(job, captured, plan, 0, Length(steps=8 - start.position.updates), start).run(notify=lambda e: None)
    for name, average in averages(rest).items():
        assert torch.equal(average, whole[name]), name
    assert roundelay.verify(make(), plan=plan, steps=3, resume=tmp_path / "a").equal


def test_evaluate_gets_the_averages_and_the_model_ends_with_the_weights(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return {"n": len(seen)}

    job = make(evaluate=evaluate, ema=DECAY)
    plan = roundelay.plan(job, workers=2, rule="1f1b", cuts="equal")
    assert plan.ema == DECAY
    trained = roundelay.train(job, plan=plan, epochs=2, save_to=tmp_path / "run")
    found = averages(trained)
    for name, average in found.items():
        assert torch.equal(seen[-1][name], average), name
        assert torch.equal(job.model.get_parameter(name), trained.snapshot.parameters[name]), name
    raw = roundelay.load(mlp(5), tmp_path / "run")
    averaged = roundelay.load(mlp(5), tmp_path / "run", averaged=True)
    for name, average in found.items():
        assert torch.equal(averaged.get_parameter(name), average), name
        assert torch.equal(raw.get_parameter(name), trained.snapshot.parameters[name]), name
    assert torch.equal(averaged.get_buffer("1.running_mean"), raw.get_buffer("1.running_mean"))


def test_averages_that_are_not_there_cannot_be_loaded(tmp_path: Path) -> None:
    plan = roundelay.plan(make(), workers=1, rule="1f1b", cuts="equal")
    roundelay.train(make(), plan=plan, steps=1, save_to=tmp_path / "run")
    with pytest.raises(CheckpointError, match="no averages"):
        roundelay.load(mlp(), tmp_path / "run", averaged=True)


def test_a_run_that_goes_on_without_averages_drops_them_and_with_them_begins_anew(tmp_path: Path) -> None:
    with_them = roundelay.plan(make(), workers=2, rule="1f1b", ema=DECAY, cuts="equal")
    without = roundelay.plan(make(), workers=2, rule="1f1b", cuts="equal")
    roundelay.train(make(), plan=with_them, steps=2, save_to=tmp_path / "a")
    dropped = roundelay.train(make(), plan=without, steps=2, resume=tmp_path / "a", save_to=tmp_path / "b")
    assert averages(dropped) == {}
    assert roundelay.verify(make(), plan=with_them, steps=2, resume=tmp_path / "b").equal


@pytest.mark.parametrize("decay", [1.0, 1.5])
def test_a_decay_that_averages_nothing_is_refused(decay: float) -> None:
    with pytest.raises(PlanError, match="ema of the plan"):
        roundelay.plan(make(), workers=1, rule="1f1b", ema=decay, cuts="equal")


@pytest.mark.parametrize(("rule", "transport"), [("1f1b", "memory"), ("pipedream", "shm"), ("zb-v", "gloo")])
def test_an_optimizer_that_switches_trains_in_its_mode_and_is_evaluated_in_the_other(
    rule: str, transport: str, tmp_path: Path
) -> None:
    seen: list[dict[str, Tensor]] = []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return {}

    def job() -> roundelay.Job:
        return make(optimizer=ScheduleFree, scheduler=None, evaluate=evaluate)

    plan = roundelay.plan(job(), workers=2, rule=rule, transport=transport, cuts="equal")
    assert roundelay.verify(job(), plan=plan, steps=5).equal
    ours = job()
    trained = roundelay.train(ours, plan=plan, epochs=1, save_to=tmp_path / "run")
    weights, states = trained.snapshot.parameters, trained.snapshot.optimizer
    assert not torch.equal(states["8.weight"][EVALUATED], weights["8.weight"])
    for name, state in states.items():
        assert torch.allclose(state[EVALUATED], state["x"], atol=1e-6), name
        assert torch.equal(seen[-1][name], state[EVALUATED])
        assert torch.equal(ours.model.get_parameter(name), state[EVALUATED])
        assert torch.equal(roundelay.load(mlp(), tmp_path / "run").get_parameter(name), state[EVALUATED])
