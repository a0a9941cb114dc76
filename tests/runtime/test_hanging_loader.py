"""A loader that never comes back: before a run, in it, beside it and in its reference it is told by name, in time."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import roundelay
from roundelay.actor.machine import Run
from roundelay.errors import DeadlineError, RoundelayError, UserCodeError, WorkerLostError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.job import Job
from roundelay.launching.failure_tracker import GRACE_S, FailureTracker
from roundelay.proof import plain_baseline, run_vs_reference
from roundelay.runtime.handlers import Context, do_forward
from roundelay.runtime.loading import prefetch
from roundelay.runtime.loading.loader_probe import first_batch, reading_s
from roundelay.runtime.processes.child_process import end_children_with_thread
from roundelay.runtime.processes.worker_messages import Report, failure
from roundelay.session.training import Length, Session
from tests.conftest import alive, nothing_left_behind

ENDLESS_S = 60.0
Batch = tuple[torch.Tensor, torch.Tensor]

let_go = threading.Event()


@pytest.fixture(autouse=True)
def in_the_end() -> Iterator[None]:
    """Let every thread go that hangs: as long as it does, it has the generators to itself."""
    let_go.clear()
    yield
    let_go.set()
    end = time.monotonic() + ENDLESS_S
    while any(thread.name == "roundelay-reader" for thread in threading.enumerate()):
        assert time.monotonic() < end, "a reader is left"
        time.sleep(0.01)


def hanging(at: int, epoch: int) -> Iterator[Batch]:
    """Batches of four rows; one of them never comes."""
    for number in range(20):
        if number == at:
            let_go.wait(ENDLESS_S)
        yield torch.full((4, 6), float(number)), torch.zeros(4, dtype=torch.long)


class Rows(Dataset[Batch]):
    """Rows, one of which never comes; who is asked for it leaves its number in a folder."""

    def __init__(self, at: int, folder: Path) -> None:
        self.at, self.folder = at, folder

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Batch:
        if index == self.at:
            (self.folder / str(os.getpid())).touch()
            time.sleep(ENDLESS_S)
        return torch.full((6,), float(index)), torch.tensor(index % 3)


def in_processes(folder: Path, at: int, epoch: int) -> DataLoader[Batch]:
    """The same, loaded by two processes."""
    return DataLoader(Rows(4 * at, folder), batch_size=4, num_workers=2)


def small(batches: Callable[[int], Any]) -> Job:
    """Two layers on rows of six."""
    torch.manual_seed(0)
    return Job(
        model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=batches,
        optimizer=partial(SGD, lr=0.05),
    )


@pytest.mark.parametrize("at", [0, 3])
def test_before_a_run_it_is_told_with_its_batch(at: int) -> None:
    place = re.escape(f"the data: batch {at} of batches(0): got no batch from the loader for 0.3 s")
    with pytest.raises(DeadlineError, match=f"{place}.*--deadline-s"):
        reading_s(partial(hanging, at), 0, 1, 0.3) if at else first_batch(partial(hanging, at), 0, 0.3)


def test_before_a_run_the_loader_s_processes_end_as_well(tmp_path: Path) -> None:
    with nothing_left_behind(), pytest.raises(DeadlineError, match=r"batch 3 of batches\(0\)"):
        reading_s(partial(in_processes, tmp_path, 3), 0, 1, 5.0)
    assert not asleep(tmp_path)


def test_planning_has_the_deadline_of_its_plan() -> None:
    job = small(partial(hanging, 3))
    with pytest.raises(DeadlineError, match=r"batch 3 of batches\(0\).*for 0.3 s"):
        roundelay.plan(job, workers=2, cuts="equal", deadline_s=0.3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_a_deadline_that_nobody_can_keep_is_refused_before_anything_is_asked(seconds: float) -> None:
    asked: list[int] = []
    with pytest.raises(RoundelayError, match="deadline_s"):
        roundelay.plan(small(lambda epoch: asked.append(epoch)), workers=2, deadline_s=seconds)
    assert not asked


def test_a_long_wait_is_told_and_a_slow_loader_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "ON_WAIT_S", 0.1)
    told: list[tuple[str, float]] = []
    twice = threading.Event()

    def tell(what: str, seconds: float) -> None:
        told.append((what, seconds))
        if len(told) == 2:
            twice.set()

    def slow(epoch: int) -> Iterator[Batch]:
        twice.wait(ENDLESS_S / 2)
        yield from hanging(20, epoch)

    first_batch(slow, 0, ENDLESS_S, tell)
    assert {what for what, _ in told} == {"batch 0 of batches(0)"}
    assert [seconds for _, seconds in told] == sorted(seconds for _, seconds in told)
    assert 0.1 <= told[0][1] < ENDLESS_S / 2
    assert len(told) >= 2


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_in_a_run_the_loader_is_the_first_cause_and_its_processes_end(transport: str, tmp_path: Path) -> None:
    """All workers wait as long as the first one does for its batch; some have begun before."""
    job = small(partial(in_processes, tmp_path, 16))
    made = roundelay.plan(job, workers=2, rule="pipedream", micro_batches=1, cuts="equal", transport=transport)
    plan = replace(made, deadline_s=5.0)
    with nothing_left_behind(), pytest.raises(DeadlineError, match=r"the data: batch 16 of batches\(0\)"):
        roundelay.train(job, plan=plan, epochs=1)
    assert not asleep(tmp_path)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_worker_that_is_ended_for_its_silence_is_not_told_of_as_killed(transport: str) -> None:
    """Worker 1 computes for longer than the other waits for it; what its end by the launcher leaves is no cause."""

    def slow(context: Context, run: Run) -> MicroBatch | None:
        time.sleep(5.0 if run.g == 1 else 0.0)
        return do_forward(context, run)

    job = small(partial(hanging, 20))
    captured = roundelay.capture(job)
    made = roundelay.plan(
        job, captured=captured, workers=2, rule="pipedream", micro_batches=1, cuts="equal", transport=transport
    )
    session = Session(job, captured, replace(made, deadline_s=2.0), 0, Length(steps=6))
    with nothing_left_behind(), pytest.raises(DeadlineError, match="worker 0: got silence for 2 s") as told:
        session.run(notify=lambda event: None, handlers={1: {"forward": slow}})
    assert "takes long in worker 1, which reported no timeout" in told.value.remedy


def asleep(folder: Path) -> list[int]:
    """The processes that have gone to sleep, as they have noted, and are there ten seconds later."""
    noted = [int(path.name) for path in folder.iterdir()]
    assert noted, "none has gone to sleep"
    end = time.monotonic() + 10
    while (left := [pid for pid in noted if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def test_an_evaluation_that_keeps_the_loader_waiting_for_too_long_is_told() -> None:
    def slow(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        time.sleep(0.01)  # so that the loader waits for a free register, and has not read all when the first one begins
        return functional.cross_entropy(outputs, batch[1])

    job = replace(small(partial(hanging, 99)), loss=slow, evaluate=lambda model: {"waited": let_go.wait(ENDLESS_S)})
    plan = replace(roundelay.plan(job, workers=2, transport="memory", cuts="equal"), deadline_s=2.0)
    with pytest.raises(DeadlineError, match=r"the data: .*no batch for 2 s .* `evaluate` holds them.*--deadline-s"):
        roundelay.train(job, plan=plan, epochs=100)


def test_the_reference_waits_no_longer_than_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, place = threading.Event(), run_vs_reference._compare_with_reference

    def batches(epoch: int) -> Iterator[Batch]:
        return hanging(5 if begun.is_set() else 20, epoch)

    def judged(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        return place(*args, **kwargs)

    job = small(batches)
    made = roundelay.plan(job, workers=2, rule="pipedream", micro_batches=1, cuts="equal")
    plan = replace(made, deadline_s=2.0)
    monkeypatch.setattr(run_vs_reference, "_compare_with_reference", judged)
    with pytest.raises(DeadlineError, match=r"batch 5 of batches\(0\)"):
        roundelay.verify(job, plan=plan, steps=8)


def test_plain_pytorch_beside_the_run_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plain_baseline, "LIMIT_S", 5.0)
    with nothing_left_behind():
        assert plain_baseline.measure(small(partial(in_processes, tmp_path, 3)), 0, 1) is None
    assert not asleep(tmp_path)
    monkeypatch.setattr(plain_baseline, "LIMIT_S", 30.0)
    assert plain_baseline.measure(small(partial(hanging, 20)), 0, 1) is not None


def test_plain_pytorch_leaves_parts_in_eval_mode_as_a_run_does(tmp_path: Path) -> None:
    class Seen(nn.Tanh):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (tmp_path / str(self.training)).touch()
            return super().forward(x)

    job = small(partial(hanging, 20))
    model = nn.Sequential(nn.Linear(6, 3), Seen())
    model[1].eval()
    assert plain_baseline.measure(replace(job, model=model), 0, 1) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["False"]
    assert plain_baseline.measure(replace(job, model=model.eval()), 0, 1) is not None
    assert {path.name for path in tmp_path.iterdir()} == {"False", "True"}


def test_what_a_killed_process_has_forked_ends_with_it() -> None:
    reading, writing = os.pipe()
    libc = ctypes.CDLL(None)
    child = os.fork()
    if not child:
        try:
            end_children_with_thread(libc)
            inner = os.fork()
            if not inner:
                time.sleep(0.2)  # it has asked the system first of all
                os.write(writing, f"{os.getpid()}\n".encode())
            time.sleep(ENDLESS_S)
        finally:
            os._exit(0)
    inner = int(os.read(reading, 99))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    end = time.monotonic() + 10
    while alive(inner) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(inner)
    os.close(reading), os.close(writing)


# --- who is told of, when several fail


def own(worker: int) -> Report:
    """What a worker met itself."""
    return failure(worker, UserCodeError("the loss", got="a hole", expected="none", remedy="Fill it."))


def data(worker: int) -> Report:
    """Its loader hangs."""
    return failure(worker, DeadlineError("the data: batch 3", got="none", expected="one", remedy="Look."))


def silence(worker: int) -> Report:
    """It has waited in vain for others."""
    return failure(worker, DeadlineError(f"worker {worker}", got="silence", expected="a message", remedy="Look."))


def unmet(worker: int) -> Report:
    """It could not connect to the others."""
    subject = f"worker {worker} meeting the others at /store"
    return failure(worker, DeadlineError(subject, got="a broken connection", expected="3 workers", remedy="Look."))


def death(worker: int) -> Report:
    """It is gone."""
    return failure(worker, WorkerLostError(f"worker {worker} (process 9)", got="SIGKILL", expected="-", remedy="-"))


def lost(worker: int, other: int) -> Report:
    """It has lost another."""
    return failure(worker, WorkerLostError(f"worker {other}", got="gone", expected="-", remedy="-"))


def aborted(worker: int) -> Report:
    """Its endpoint was aborted, as the run was over."""
    subject = f"worker {worker} sending to worker {worker + 1}"
    return failure(worker, WorkerLostError(subject, got="an aborted endpoint", expected="an open one", remedy="-"))


@pytest.mark.parametrize(
    "failures",
    [
        [silence(1), data(0)],
        [lost(2, 1), silence(1), own(0)],
        [lost(0, 1), silence(2), death(1)],
        [lost(0, 1), silence(1)],
        [aborted(0), silence(1)],
        [unmet(0), unmet(2), death(1)],
        [lost(0, 1), unmet(1)],
    ],
)
def test_a_wait_for_others_is_told_only_if_nothing_explains_it(failures: list[Report]) -> None:
    tracker = FailureTracker(5, lambda report: None)
    for each in failures[:-1]:
        tracker.add(each)
        assert not tracker.is_over(10.0)
    assert not tracker.is_over(10.0 + 0.9 * GRACE_S)
    assert tracker.is_over(10.1 + GRACE_S)
    tracker.add(failures[-1])
    with pytest.raises(RoundelayError) as told:
        tracker.raise_failure()
    assert told.value.subject == failures[-1].data["subject"]


@pytest.mark.parametrize("cause", [own(0), data(0)])
def test_what_a_worker_met_itself_ends_the_run_at_once(cause: Report) -> None:
    tracker = FailureTracker(5, lambda report: None)
    tracker.add(cause)
    assert tracker.is_over(0.0)
