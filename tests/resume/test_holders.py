"""Who has the state writes it: nothing is gathered that nobody asks for, and who does not see the folder sends it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.checkpoint.held_state import HeldState
from roundelay.errors import DeadlineError, UsageError
from roundelay.ir.micro_batch import stream
from roundelay.planning.planning import capture
from roundelay.runtime import state_reports, worker
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.state_reports import StateReporter, StateUse
from roundelay.session.launched_states import announced_use, check_leader_reads, fetched_use
from roundelay.session.training import Length, Saving, Session, StateGatherer
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
        self.note_sums, self.sums = self.own.note_sums, self.own.sums


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


class Scaled(nn.Module):
    """A network with a buffer that its ``state_dict`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.norm(self.first(x)) * self.scale)
        return made


@pytest.mark.parametrize("sent", [False, True])
def test_a_checkpoint_has_the_buffers_that_the_state_dict_has(
    sent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(Scaled())
    if sent:
        monkeypatch.setattr(worker, "StateReporter", OneHostOnly)
    plan = roundelay.plan(job, workers=2, cuts="equal")
    roundelay.train(job, plan=plan, steps=2, save_to=tmp_path / "c")
    assert set(load(tmp_path / "c").buffers) == {f"norm.{name}" for name, _ in nn.BatchNorm1d(8).named_buffers()}


def test_an_interrupt_leaves_the_callers_model_with_the_weights_of_the_last_epoch() -> None:
    job = make(mlp(), evaluate=None)
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}

    def interrupt(event: Any) -> None:
        if event.update == 8:  # epochs have five updates
            deadline = time.monotonic() + 60  # the weights are loaded in the background
            while all(torch.equal(p, before[n]) for n, p in job.model.named_parameters()):
                assert time.monotonic() < deadline, "no weights came"
                time.sleep(0.001)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roundelay.train(job, plan=roundelay.plan(job, workers=2), epochs=100, on_update=interrupt)
    expected = make(mlp())
    roundelay.train(expected, plan=roundelay.plan(expected, workers=2), epochs=1)
    for (name, parameter), other in zip(job.model.named_parameters(), expected.model.parameters(), strict=True):
        assert not torch.equal(parameter, before[name])
        assert torch.equal(parameter, other)


class Slow:
    """Writes that take their time, or never end."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.written = seconds, 0

    def __call__(self, *_: Any) -> Any:
        time.sleep(self.seconds)
        self.written += 1
        raise OSError("slow")


@pytest.mark.parametrize(("seconds", "hangs"), [(0.3, False), (30.0, True)])
def test_the_end_of_a_run_waits_for_a_slow_disk_and_not_for_a_hung_one(
    seconds: float, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, reports = Slow(seconds), list[Report]()
    monkeypatch.setattr(state_reports, "write_state", slow)
    monkeypatch.setattr(state_reports, "_held", lambda *_: HeldState(0, {}, {}, {}))
    monkeypatch.setattr(state_reports.StateReporter, "note_sums", lambda *_: None)
    reporter = StateReporter(0, StateUse(folder=tmp_path), reports.append)
    for header in stream([1, 1, 1]):
        reporter.hand_over(None, header._replace(saved=1), None)  # type: ignore[arg-type]
    if hangs:
        with pytest.raises(DeadlineError, match=r"no further byte within 0\.5 s"):
            reporter.finish(0.5)
    else:
        reporter.finish(0.5)
        assert slow.written == len(reports) == 3


def test_a_long_write_is_no_hung_one_while_its_file_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def growing(folder: Path, *_: Any) -> Any:
        for size in range(1, 16):
            (folder / ".tmpabcdef").write_bytes(b"x" * size)
            time.sleep(0.1)
        raise OSError("grown")

    reports = list[Report]()
    monkeypatch.setattr(state_reports, "write_state", growing)
    monkeypatch.setattr(state_reports, "_held", lambda *_: HeldState(0, {}, {}, {}))
    monkeypatch.setattr(state_reports.StateReporter, "note_sums", lambda *_: None)
    reporter = StateReporter(0, StateUse(folder=tmp_path), reports.append)
    reporter.hand_over(None, stream([1])[0]._replace(saved=1), None)  # type: ignore[arg-type]
    reporter.finish(0.5)
    assert len(reports) == 1


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


def test_the_python_api_gathers_weights_after_epochs_and_everything_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, own = Reports(monkeypatch), session()
    trained = own.run(saving=Saving(path=tmp_path / "c"))
    full = [names for names in reports.tensors if names]
    assert len(full) == 2 * own.plan.num_stages
    assert sum("0.weight" in names for names in full) == 2
    assert sum("0.weight/exp_avg" in names for names in full) == 1
    for name, parameter in own.job.model.named_parameters():
        assert torch.equal(parameter, trained.snapshot.parameters[name])


# Under a launcher


class Party:
    """A store, and what is asked of a group of processes for it."""

    restart, trusting = 0, True

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def publish(self, name: str, text: str) -> None:
        self.texts[name] = text

    def fetch(self, name: str) -> str:
        return self.texts[name]


def test_a_process_finds_out_whether_it_sees_the_folder(tmp_path: Path) -> None:
    process_group: Any = Party()
    use = StateUse(folder=tmp_path / "run" / "checkpoint", buffers=frozenset({"b"}), after_epoch="weights")
    with announced_use(process_group, use, 3):
        assert fetched_use(process_group) == (use, 3)
        (probe,) = (tmp_path / "run" / "checkpoint").iterdir()
        probe.unlink()  # as on a host with another folder of that name
        assert fetched_use(process_group) == (replace(use, shared=False), 3)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_without_checkpoints_there_is_no_folder_to_see() -> None:
    process_group: Any = Party()
    with announced_use(process_group, StateUse(), None):
        assert fetched_use(process_group) == (StateUse(), None)


def test_under_a_launcher_the_leader_has_stage_0() -> None:
    plan = session().plan
    check_leader_reads(plan)
    stages = tuple(replace(s, workers=other.workers) for s, other in zip(plan.stages, plan.stages[::-1], strict=True))
    with pytest.raises(UsageError, match="stage 0 of the plan under a launcher"):
        check_leader_reads(replace(plan, stages=stages))
