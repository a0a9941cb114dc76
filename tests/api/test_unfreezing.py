"""A run goes on with other trained parameters than its checkpoint had: as plain PyTorch does, over any rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.proof.run_vs_reference import verify_session
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.session.events import Drained
from roundelay.session.resume import load_checkpoint
from roundelay.session.training import Length, Session
from tests.api.jobs import make
from tests.resume.cuts import every_checkpoint


def job(*frozen: int) -> roundelay.Job:
    """Of three layers, of which some are frozen."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3))
    for layer in frozen:
        model[layer].requires_grad_(False)
    return make(model, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2), scheduler=None)


def planned(made: roundelay.Job, rule: str = "1f1b", workers: int = 2) -> roundelay.Plan:
    """Cut in the middle."""
    return roundelay.plan(made, workers=workers, rule=rule, micro_batches=1, cuts="equal")


@pytest.mark.parametrize(("first", "then"), [((0,), ()), ((0, 2), (2,)), ((), (0,))])
@pytest.mark.parametrize("workers", [2, 3])
def test_it_goes_on_as_plain_pytorch_does(first: Any, then: Any, workers: int, tmp_path: Path) -> None:
    plain = job()
    optimizer = plain.optimizer(list(plain.model.named_parameters()))
    for update, batch in enumerate(read_batches(plain.batches, 0, Extent(batches=8))):
        frozen = first if update < 4 else then
        for layer in (0, 2, 4):
            plain.model[layer].requires_grad_(layer not in frozen)  # type: ignore[index, operator]
        plain.loss(plain.model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    roundelay.train(job(*first), plan=planned(job(*first)), steps=4, save_to=tmp_path / "run")
    plan = planned(job(*then), workers=workers)
    rest = roundelay.train(job(*then), plan=plan, steps=4, resume=tmp_path / "run")
    for name, weight in plain.model.named_parameters():
        assert torch.equal(rest.snapshot.parameters[name], weight.detach()), name
    made = {name: int(state["step"]) for name, state in rest.snapshot.optimizer.items()}
    layers = {layer: 4 * (layer not in first) + 4 * (layer not in then) for layer in (0, 2, 4)}
    wanted = {f"{layer}.{kind}": steps for layer, steps in layers.items() for kind in ("weight", "bias")}
    assert made == {name: steps for name, steps in wanted.items() if steps}
    assert roundelay.verify(job(*then), plan=plan, steps=2, resume=tmp_path / "run").equal


def test_in_mid_flight_the_stages_start_empty_and_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with every_checkpoint(monkeypatch, tmp_path):
        plan = planned(job(0), "pipeoptim")
        roundelay.train(job(0), plan=plan, steps=6, save_to=tmp_path / "run", checkpoint_every=1)
    assert load(tmp_path / "4").flight is not None
    for frozen in ((), (0,)):
        made = job(*frozen)
        captured = roundelay.capture(made)
        start = load_checkpoint(tmp_path / "4", captured)
        session = Session(made, captured, planned(made, "pipeoptim"), 0, Length(steps=3), start)
        if frozen:
            assert session.drained is None
            continue
        assert isinstance(session.drained, Drained)
        assert "trained parameters from 4 of 6" in session.drained.reason
        assert verify_session(session).equal
