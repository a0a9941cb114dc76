"""Who has the state writes it: nothing is gathered that nobody asks for, and who does not see the folder sends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.api.launched_states import announced_use, check_leader_reads, fetched_use
from roundelay.api.planning import capture
from roundelay.api.training import Length, Saving, Session, StateGatherer
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import UsageError
from roundelay.runtime import worker
from roundelay.runtime.state_reports import StateReporter, StateUse
from roundelay.runtime.worker_messages import Report
from tests.api.jobs import make, mlp
from tests.equivalence.cells import VARIANTS
from tests.resume.cuts import differences, every_checkpoint
from tests.resume.kill import differences as between_checkpoints
from tests.resume.test_rules import trip


class OneHostOnly:
    """A worker's reporter as on the leader's host, if it is worker 0, and on another host if it is not."""

    def __init__(self, number: int, use: StateUse, report: Any) -> None:
        self.own = StateReporter(number, replace(use, shared=number == 0), report)
        self.hand_over, self.finish = self.own.hand_over, self.own.finish


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_what_the_launcher_writes_for_holders_on_other_hosts_is_what_they_would_have_written(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trip("batchnorm", VARIANTS["pipeoptim improved mixed"], (4, 1), "adamw")
    made = replace(made, plan=replace(made.plan, transport=transport))
    with every_checkpoint(monkeypatch, tmp_path / "own"):
        whole = made.whole(Saving(path=tmp_path / "own", every=2))
    with monkeypatch.context() as patched, every_checkpoint(monkeypatch, tmp_path / "sent"):
        patched.setattr(worker, "StateReporter", OneHostOnly)
        made.whole(Saving(path=tmp_path / "sent", every=2))
    for updates in (4, 6, 10):
        own, sent = (load(tmp_path / folder / str(updates)) for folder in ("own", "sent"))
        assert between_checkpoints(own, sent) == []
        names = [{file.name for file in (tmp_path / f / str(updates)).iterdir()} for f in ("own", "sent")]
        assert names[0] == names[1]
    start = load(tmp_path / "sent" / "4")
    assert start.flight is not None
    assert differences(whole, made.rest(start), start) == []


class Reports:
    """The reports of states, as the launcher gets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[set[str]] = []
        real = StateGatherer.take

        def take(gatherer: Any, report: Report) -> None:
            self.tensors.append(set(report.tensors))
            real(gatherer, report)

        monkeypatch.setattr(StateGatherer, "take", take)


def evaluated(model: nn.Module) -> dict[str, float]:
    """A number of the weights."""
    return {"sum": float(sum(p.double().sum() for p in model.parameters()))}


def session(**fields: Any) -> Session:
    """Two epochs of five updates each."""
    job = make(mlp(), optimizer=lambda named: torch.optim.Adam(named, lr=1e-2), **fields)
    captured = capture(job)
    chosen = roundelay.plan(job, workers=2, rule="pipedream", captured=captured, cuts="equal")
    return Session(job, captured, chosen, 0, Length(epochs=2))


def test_checkpoints_alone_gather_nothing_and_have_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports, own = Reports(monkeypatch), session()
    before = {name: p.detach().clone() for name, p in own.job.model.named_parameters()}
    own.run(saving=Saving(path=tmp_path / "c", every=2), gathers="nothing")
    assert len(reports.tensors) >= 2 * own.plan.num_stages
    assert set().union(*reports.tensors) == set()
    assert all(torch.equal(p, before[name]) for name, p in own.job.model.named_parameters())
    expected = session().run()
    found = load(tmp_path / "c")
    assert {n: t.tolist() for n, t in found.parameters.items()} == {
        n: t.tolist() for n, t in expected.snapshot.parameters.items()
    }


def test_an_evaluation_gathers_weights_and_no_state_of_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports(monkeypatch)
    own = session(evaluate=evaluated)
    trained = own.run(saving=Saving(path=tmp_path / "c"), gathers="nothing")
    assert len(trained.evaluations) == 2
    gathered = set().union(*reports.tensors)
    assert gathered == {name for name, _ in [*own.job.model.named_parameters(), *own.job.model.named_buffers()]}
    assert load(tmp_path / "c").optimizer["0.weight"].keys() >= {"exp_avg", "step"}


def test_the_python_api_gathers_the_end_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports, own = Reports(monkeypatch), session()
    trained = own.run(saving=Saving(path=tmp_path / "c"))
    full = [names for names in reports.tensors if names]
    assert len(full) == own.plan.num_stages
    assert "0.weight/exp_avg" in set().union(*full)
    for name, parameter in own.job.model.named_parameters():
        assert torch.equal(parameter, trained.snapshot.parameters[name])


# Under a launcher


class Party:
    """A store, and what is asked of a group of processes for it."""

    restart = 0

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def publish(self, name: str, text: str) -> None:
        self.texts[name] = text

    def fetch(self, name: str) -> str:
        return self.texts[name]


def test_a_process_finds_out_whether_it_sees_the_folder(tmp_path: Path) -> None:
    party: Any = Party()
    use = StateUse(folder=tmp_path / "run" / "checkpoint", buffers=frozenset({"b"}), after_epoch="weights")
    with announced_use(party, use, 3):
        assert fetched_use(party) == (use, 3)
        (probe,) = (tmp_path / "run" / "checkpoint").iterdir()
        probe.unlink()  # as on a host with another folder of that name
        assert fetched_use(party) == (replace(use, shared=False), 3)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_without_checkpoints_there_is_no_folder_to_see() -> None:
    party: Any = Party()
    with announced_use(party, StateUse(), None):
        assert fetched_use(party) == (StateUse(), None)


def test_under_a_launcher_the_leader_has_stage_0() -> None:
    plan = session().plan
    check_leader_reads(plan)
    stages = tuple(replace(s, workers=other.workers) for s, other in zip(plan.stages, plan.stages[::-1], strict=True))
    with pytest.raises(UsageError, match="stage 0 of the plan under a launcher"):
        check_leader_reads(replace(plan, stages=stages))
