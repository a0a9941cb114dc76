"""The person's code has a training end early: in good order, at one batch for all stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import roundelay
from roundelay.checkpoint.checkpoint import Until, load
from roundelay.errors import UserCodeError
from roundelay.planning.planning import capture
from roundelay.session.checkpointing import Saving
from roundelay.session.events import Event, Saved
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session, Trained
from tests.api.jobs import make

RULES = ["1f1b", "pipeoptim", "zb-v"]
MANY = 50


def planned(job: roundelay.Job, rule: str, transport: str = "memory") -> roundelay.Plan:
    """A plan for two workers."""
    return roundelay.plan(job, workers=2, rule=rule, transport=transport, cuts="equal")


def same(one: Trained, other: Trained) -> None:
    """Both have made the same updates, bit for bit."""
    assert len(one.updates) == len(other.updates)
    assert one.micro_losses == other.micro_losses
    for name, tensor in other.snapshot.parameters.items():
        assert torch.equal(one.snapshot.parameters[name], tensor), name
    for name, state in other.snapshot.optimizer.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(one.snapshot.optimizer[name][key]), torch.as_tensor(value)), (name, key)


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_that_evaluate_ends_is_a_run_of_so_many_updates(rule: str, transport: str, tmp_path: Path) -> None:
    seen: list[int] = []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        seen.append(1)
        if len(seen) == 2:
            raise roundelay.StopTraining("no better for two epochs", {"loss": 0.5})
        return {"loss": 1.0}

    job = replace(make(), evaluate=evaluate)
    plan = planned(job, rule, transport)
    ended = roundelay.train(job, plan=plan, epochs=MANY, save_to=tmp_path / "run")
    assert ended.stopped == "no better for two epochs"
    per_epoch = len(list(job.batches(0)))
    assert 2 * per_epoch < len(ended.updates) < 40 * per_epoch
    assert ended.evaluations[1].metrics == {"loss": 0.5}
    same(ended, roundelay.train(make(), plan=plan, steps=len(ended.updates)))
    assert load(tmp_path / "run").until == Until()  # a run that goes on from here is a new one
    assert load(tmp_path / "run").flight is None


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_a_run_that_on_update_ends_is_a_run_of_so_many_updates(transport: str) -> None:
    def stop(updated: roundelay.Updated) -> None:
        if updated.update >= 4:
            raise roundelay.StopTraining("enough")

    plan = planned(make(), "pipeoptim", transport)
    ended = roundelay.train(make(), plan=plan, epochs=MANY, on_update=stop)
    assert ended.stopped == "enough"
    assert 5 < len(ended.updates) < 40 * len(list(make().batches(0)))
    same(ended, roundelay.train(make(), plan=plan, steps=len(ended.updates)))
    assert roundelay.verify(make(), plan=plan, steps=len(ended.updates)).equal


def test_a_run_that_nobody_ends_says_nothing_of_it() -> None:
    assert roundelay.train(make(), plan=planned(make(), "1f1b"), steps=2).stopped == ""


def test_another_error_of_on_update_is_still_an_error() -> None:
    def fails(updated: roundelay.Updated) -> None:
        raise ValueError("mine")

    with pytest.raises(UserCodeError, match="mine"):
        roundelay.train(make(), plan=planned(make(), "1f1b"), steps=2, on_update=fails)


def test_a_checkpoint_that_is_asked_for_changes_no_bit(tmp_path: Path) -> None:
    job = make()
    captured = capture(job)
    plan = roundelay.plan(job, workers=2, rule="pipeoptim", captured=captured, cuts="equal")
    session = Session(job, captured, plan, 0, Length(steps=12))
    session.control.save_soon()
    events: list[Any] = []

    def heard(event: Event) -> None:
        events.append(event)

    asked = session.run(notify=heard, saving=Saving(path=tmp_path / "run"))
    assert next(event.updates for event in events if isinstance(event, Saved)) == 1
    same(asked, roundelay.train(make(), plan=plan, steps=12))
