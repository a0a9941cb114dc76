"""`train(..., on_update=f)`: who is told what, when and where; and what becomes of a run whose function raises."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import UserCodeError
from tests.api.jobs import make, mlp

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "jobs.md"
TRANSPORTS = ("memory", "gloo")


def train(transport: str, job: roundelay.Job | None = None, **options: Any) -> Any:
    """Train on two workers."""
    job = make() if job is None else job
    plan = roundelay.plan(job, workers=2, rule="pipedream", micro_batches=2, transport=transport)
    return roundelay.train(job, plan=plan, **options)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_is_called_once_per_update_in_order_in_the_callers_thread(transport: str) -> None:
    seen: list[tuple[roundelay.Updated, int, int]] = []
    result = train(
        transport,
        epochs=2,
        on_update=lambda updated: seen.append((updated, os.getpid(), threading.get_ident())),
    )
    told = [updated for updated, _, _ in seen]
    assert [(one.update, one.epoch, one.rows) for one in told] == [(t, t // 5, 8) for t in range(10)]
    assert tuple(told) == result.updates
    assert {(pid, thread) for _, pid, thread in seen} == {(os.getpid(), threading.get_ident())}
    seconds = [one.seconds for one in told]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert all(len(one.busy) == 2 and all(0 <= share <= 1 for share in one.busy) for one in told)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_learning_rates_are_those_of_the_update_also_after_a_resume(tmp_path: Path, transport: str) -> None:
    rates: dict[int, tuple[float, ...]] = {}
    job = make(mlp())

    def note(updated: roundelay.Updated) -> None:
        rates[updated.update] = updated.learning_rates

    train(transport, job, steps=3, save_to=tmp_path / "c", on_update=note)
    train(transport, job, steps=2, resume=tmp_path / "c", on_update=note)
    assert rates == {t: (pytest.approx(1e-2 * 0.9**t), pytest.approx(5e-3 * 0.9**t)) for t in range(5)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_a_scheduler_the_rates_stay(transport: str) -> None:
    rates = []
    train(transport, make(scheduler=None), steps=3, on_update=lambda updated: rates.append(updated.learning_rates))
    assert rates == [(1e-2, 5e-3)] * 3


def test_an_optimizer_that_holds_state_from_its_making_has_learning_rates_too() -> None:
    rates = []
    job = make(optimizer=lambda named: torch.optim.Adagrad([p for _, p in named], lr=0.5))
    train("memory", job, steps=2, on_update=lambda updated: rates.append(updated.learning_rates))
    assert rates == [(0.5,), (0.45,)]


def test_observers_are_called_with_every_event_before_on_update(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    observers = [lambda event, n=n: seen.append((f"observer {n}", type(event).__name__)) for n in range(2)]
    job = make(evaluate=lambda model: {"one": 1.0})
    train(
        "memory",
        job,
        steps=1,
        save_to=tmp_path / "c",
        observers=observers,
        on_update=lambda updated: seen.append(("on_update", "Updated")),
    )
    expected = [("observer 0", "Updated"), ("observer 1", "Updated"), ("on_update", "Updated")]
    assert seen[:3] == expected
    assert {kind for who, kind in seen if who == "observer 0"} == {"Updated", "Saved", "Evaluated"}


def test_an_observer_that_raises_or_stops_ends_the_run(tmp_path: Path) -> None:
    def stop(event: object) -> None:
        raise roundelay.StopTraining("enough")

    def fail(event: object) -> None:
        raise ValueError("broken")

    assert train("memory", steps=40, observers=[stop]).stopped == "enough"
    with pytest.raises(UserCodeError, match=r"an observer of Updated.*ValueError: broken"):
        train("memory", steps=3, observers=[fail])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_that_raises_ends_the_run_by_name_and_leaves_the_checkpoint(tmp_path: Path, transport: str) -> None:
    job = make(mlp())
    seen = []

    def stop(updated: roundelay.Updated) -> None:
        seen.append(updated.update)
        if (tmp_path / "c" / "checkpoint.json").exists():
            raise ZeroDivisionError("enough")

    # Without an end of its own: only the function ends it.
    with pytest.raises(UserCodeError, match=r"on_update at update \d+: got ZeroDivisionError: enough") as caught:
        train(transport, job, epochs=100_000, save_to=tmp_path / "c", on_update=stop)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert seen == list(range(len(seen)))
    saved = load(tmp_path / "c").position.updates
    assert saved % 5 == 0
    rest = train(transport, job, steps=2, resume=tmp_path / "c")
    assert [one.update for one in rest.updates] == [saved, saved + 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_in_it_is_no_error_of_the_persons_code(transport: str) -> None:
    def interrupt(updated: roundelay.Updated) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(transport, epochs=100_000, on_update=interrupt)


def test_a_worker_alone_ends_with_its_run() -> None:
    """It waits for nobody, so nobody but itself can notice."""
    job = make()
    plan = roundelay.plan(job, workers=1, rule="pipedream", micro_batches=2)
    with pytest.raises(UserCodeError):
        roundelay.train(job, plan=plan, epochs=100_000, on_update=lambda updated: 1 / 0)
    assert [one.name for one in threading.enumerate() if one.name.startswith("roundelay")] == []


def test_the_example_of_the_page_on_jobs_reports_every_update(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind the job that stands above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROUNDELAY_RUNS")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (job,) = (block for block in blocks if block.startswith("# my_job.py"))
    (example,) = (block for block in blocks if "on_update=" in block)
    module = ModuleType("my_job")
    exec(compile(job, str(PAGE), "exec", dont_inherit=True), vars(module))
    monkeypatch.setitem(sys.modules, "my_job", module)
    exec(compile(example, str(PAGE), "exec", dont_inherit=True), {"__name__": "example"})
    *updates, trained, verified = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in updates] == [str(update) for update in range(20)]
    assert trained.startswith("Trained(rule='1f1b', workers=2, updates=20, loss: ")
    assert verified.startswith("Verification(equal=True, ")
