"""A run continued from a checkpoint, on any number of stages, is the run that was never interrupted."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import CheckpointError, JobError, UsageError
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.proof.run_vs_reference import verify_session
from roundelay.runtime.stage_state import Stage
from roundelay.session.resume import load_checkpoint
from roundelay.session.training import Length, Session, Trained
from tests.api.jobs import Tied, adam, loader, make, mlp, tokens
from tests.lower.plans import works


def train(job: Job, workers: int, rule: str = "1f1b", transport: str = "memory", **options: Any) -> Trained:
    """Plan a job and train it."""
    seed = options.get("seed", 0)
    plan = roundelay.plan(job, workers=workers, rule=rule, micro_batches=2, transport=transport, seed=seed)
    return roundelay.train(job, plan=plan, **options)


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Assert equal bits of nests of tensors."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def final(trained: Trained) -> dict[str, Any]:
    """What a run leaves."""
    snapshot = trained.snapshot
    return {"parameters": snapshot.parameters, "buffers": snapshot.buffers, "optimizer": snapshot.optimizer}


@pytest.mark.parametrize("steps", [3, 5, 7])  # within the first epoch of five, at its end, within the second
def test_a_continued_run_equals_one_that_was_never_interrupted(tmp_path: Path, steps: int) -> None:
    whole = train(make(), 2, epochs=3)
    train(make(), 2, steps=steps, save_to=tmp_path / "c")
    model = mlp(seed=99)
    for workers, transport in ((3, "memory"), (1, "memory"), (4, "memory"), (3, "gloo")):
        rest = train(make(model), workers, transport=transport, epochs=3, resume=tmp_path / "c")
        assert [u.loss for u in rest.updates] == [u.loss for u in whole.updates[steps:]]
        assert [(u.update, u.epoch) for u in rest.updates] == [(t, t // 5) for t in range(steps, 15)]
        assert_same(final(rest), final(whole))
        assert_same(dict(model.state_dict()), whole.snapshot.parameters | whole.snapshot.buffers)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_stages_of_a_continued_run_start_with_the_saved_bits(tmp_path: Path, workers: int) -> None:
    train(make(), 2, rule="pipeoptim", steps=4, save_to=tmp_path / "c")
    saved = load(tmp_path / "c")
    job = make(mlp(seed=99))
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, workers=workers, captured=captured)
    session = Session(job, captured, plan, 0, Length(steps=1), load_checkpoint(tmp_path / "c", captured))
    found: dict[str, dict[str, Any]] = {"parameters": {}, "buffers": {}, "optimizer": {}}
    for spec in session.partition.stages:
        stage = Stage(captured, spec, job, works(plan)[plan.worker_of(spec.stage)], session.initial)
        for part, values in zip(("parameters", "optimizer", "buffers"), stage.state(), strict=True):
            found[part] |= values
        assert stage.steps.scheduler is not None
        assert stage.steps.scheduler.get_last_lr() == [1e-2 * 0.9**4, 5e-3 * 0.9**4]
    assert_same(found, {"parameters": saved.parameters, "buffers": saved.buffers, "optimizer": saved.optimizer})
    assert saved.optimizer["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_finished_epoch_is_followed_by_the_next_one(tmp_path: Path) -> None:
    for length in ({"epochs": 1}, {"steps": 5}):
        train(make(), 2, save_to=tmp_path / "c", **length)
        position = load(tmp_path / "c").position
        assert (position.updates, position.epoch, position.batches_into_epoch) == (5, 1, 0)
        rest = train(make(), 2, resume=tmp_path / "c")  # nothing said: one epoch more
        assert [(u.update, u.epoch) for u in rest.updates] == [(t, 1) for t in range(5, 10)]


def test_a_length_that_lies_behind_or_data_that_are_gone_are_refused(tmp_path: Path) -> None:
    train(make(), 2, steps=3, save_to=tmp_path / "c")
    with pytest.raises(JobError, match="after the 3 that were used"):
        train(make(batches=lambda epoch: list(loader(epoch))[:2]), 2, epochs=1, resume=tmp_path / "c")
    train(make(), 2, epochs=1, save_to=tmp_path / "c")
    with pytest.raises(UsageError, match="--epochs 2 or more"):
        train(make(), 2, epochs=1, resume=tmp_path / "c")


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_the_same_plan_and_seed_give_the_same_bits_and_another_seed_others(transport: str) -> None:
    text = roundelay.plan(make(), workers=3, transport=transport).text()
    one, two, other = (
        roundelay.train(make(), plan=Plan.parse(text), steps=7, seed=seed, save_to=None) for seed in (3, 3, 4)
    )
    assert_same(final(one), final(two))
    assert [u.loss for u in one.updates] == [u.loss for u in two.updates]
    assert not torch.equal(one.snapshot.parameters["0.weight"], other.snapshot.parameters["0.weight"])


def test_transforms_see_the_same_random_numbers_in_every_run_and_epoch_by_epoch() -> None:
    seen: list[list[torch.Tensor]] = []

    def watched(epoch: int) -> Any:
        for batch in loader(epoch):
            seen[-1].append(batch[0])
            yield batch

    for _ in range(2):
        job = make(batches=watched)
        seen.append([])
        plan = roundelay.plan(job, workers=2)  # looks at the first batches, which the run then gets
        torch.rand(3)  # whatever else draws in the process does not matter
        roundelay.train(job, plan=plan, epochs=2)
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert not torch.equal(seen[1][-1], seen[1][-6]), "epochs differ"


@pytest.mark.parametrize("tied", [False, True])
def test_load_puts_the_trained_weights_into_the_plain_model(tmp_path: Path, tied: bool) -> None:
    model: nn.Module = Tied() if tied else mlp()
    job = make(model, batches=tokens) if tied else make(model)
    trained = train(job, 2, rule="pipeoptim", steps=3, save_to=tmp_path / "run" / "checkpoint")
    plain: nn.Module = Tied() if tied else mlp(seed=5)
    assert roundelay.load(plain, tmp_path / "run") is plain
    assert_same(dict(plain.state_dict()), dict(model.state_dict()))
    assert_same({n: p.detach() for n, p in plain.named_parameters()}, trained.snapshot.parameters)
    if isinstance(plain, Tied):
        assert plain.head.weight is plain.embed.weight


def test_a_wrong_model_is_refused_by_the_parameter(tmp_path: Path) -> None:
    train(make(), 2, steps=1, save_to=tmp_path / "c")
    other = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    before = other.state_dict()["0.weight"].clone()
    with pytest.raises(CheckpointError, match=r"'3\.weight'"):
        roundelay.load(other, tmp_path / "c")
    assert torch.equal(other.state_dict()["0.weight"], before)
    with pytest.raises(CheckpointError, match=r"'1\.weight'"):
        train(Job(model=other, loss=make().loss, batches=loader, optimizer=adam), 2, steps=1, resume=tmp_path / "c")


def test_a_resumed_asynchronous_run_is_proved_too(tmp_path: Path) -> None:
    train(make(), 2, rule="pipeoptim", steps=3, save_to=tmp_path / "c")
    job = make(mlp(seed=9))
    captured = roundelay.capture(job)
    plan = dataclasses.replace(roundelay.plan(job, workers=3, captured=captured, rule="pipeoptim"), predictor="paper")
    session = Session(job, captured, plan, 0, Length(steps=6), load_checkpoint(tmp_path / "c", captured))
    assert verify_session(session).equal


def test_checkpoints_between_epochs_need_a_number_and_a_place(tmp_path: Path) -> None:
    for given in ({"checkpoint_every": 2}, {"checkpoint_every": 0, "save_to": tmp_path / "c"}):
        with pytest.raises(UsageError, match="checkpoint_every"):
            train(make(), 2, steps=1, **given)


def test_an_interrupted_asynchronous_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = train(make(), 3, rule="pipeoptim", epochs=2)

    def stop(updated: roundelay.Updated) -> None:
        if updated.update == 8:
            deadline = time.monotonic() + 60.0
            while not (tmp_path / "c" / "checkpoint.json").exists() and time.monotonic() < deadline:  # on a slow disk
                time.sleep(0.005)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make(), 3, rule="pipeoptim", epochs=2, save_to=tmp_path / "c", checkpoint_every=2, on_update=stop)
    saved = load(tmp_path / "c")
    assert saved.flight is not None
    rest = train(make(mlp(seed=99)), 3, rule="pipeoptim", resume=tmp_path / "c")
    assert_same(final(rest), final(whole))
    assert [u.loss for u in rest.updates] == [u.loss for u in whole.updates[saved.position.updates :]]
