"""An error in the person's own code on a worker, wherever it strikes, ends the run at once and is told by its place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest

from roundelay.checkpoint.stored_files import is_checkpoint
from roundelay.cli.signals import Signals
from roundelay.errors import RunError
from roundelay.observe.metrics_file import read_metrics
from roundelay.session import run_summary
from tests.cli.harness import finish, here, job_file, one_screen, start

Capture = pytest.CaptureFixture[str]

ASYNC = ("--workers", 2, "--rule", "pipeoptim")
BEFORE = """
import asyncio, os, sys, threading, time
from pathlib import Path

HOME = os.getpid()

def on_worker():
    return os.getpid() != HOME or threading.current_thread().name.startswith(("worker", "roundelay-"))

class Break(torch.autograd.Function):
    '''The identity; what it does in a run depends on the values.'''

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no way back")

class Step(torch.optim.SGD):
    number = 0

    def step(self, closure=None):
        self.number += 1
        if on_worker() and self.number > 3:
            raise RuntimeError("no step")
        return super().step()

def updated():
    # what fails then is behind the first update, whichever worker's report is the slower
    deadline = time.monotonic() + 30.0
    while Path("runs").exists() and not any(p.stat().st_size for p in Path("runs").glob("*/metrics.jsonl")):
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)

def at(number, change):
    def batches(epoch):
        for i, batch in enumerate(mlp.batches(epoch)):
            if i == number > 0:
                updated()
            yield change(batch) if i == number else batch
    return batches

def fail(text):
    raise RuntimeError(text)

def loss(outputs, batch):
    if on_worker() and batch["y"].sum() < 0:
        raise RuntimeError("a loss on fire")
    return mlp.loss(outputs, batch)

def leave(outputs, batch):
    if on_worker():
        sys.exit(0)
    return mlp.loss(outputs, batch)

def cancel():
    raise asyncio.CancelledError("by the loader's own loop")  # no Exception

def first(outputs, batch):
    return fail("at once") if on_worker() else mlp.loss(outputs, batch)

def way(outputs, batch):
    return mlp.loss(Break.apply(outputs) if on_worker() else outputs, batch)
"""

#: what breaks, whether updates come before it, and what the screen must tell
CASES: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "a batch of another width": (
        "batches=at(3, lambda b: {'x': b['x'][:, :4], 'y': b['y']})",
        False,  # it is among those that are looked at while the plan is made
        ("tensor 0 of the model's call", "sizes (8, 4)"),
    ),
    "the model's forward": (
        "batches=at(3, lambda b: {'x': b['x'].long(), 'y': b['y']})",
        True,
        ("stage 0, forward of micro-batch 3", "dtype"),
    ),
    "the loss": (
        "loss=loss, batches=at(3, lambda b: b | {'y': b['y'] - 9})",
        True,
        ("stage 1, forward of micro-batch 3", "a loss on fire", "job.py:"),
    ),
    "the first loss": ("loss=first", False, ("stage 1, forward of micro-batch 0", "at once")),
    "an exit in the loss": ("loss=leave", False, ("stage 1, forward of micro-batch 0", "SystemExit")),
    "the backward": ("loss=way", True, ("stage 1, backward of micro-batch 0", "no way back")),
    "the loader": ("batches=at(3, lambda b: fail('no disk'))", True, ("batch 3 of batches(0)", "no disk")),
    "a cancelled loader": ("batches=at(3, lambda b: cancel())", True, ("batch 3 of batches(0)", "CancelledError")),
    "a batch that is none": ("batches=at(3, lambda b: 7)", True, ("stage 0, read of micro-batch 3", "without any")),
    "a batch without rows": (
        "batches=at(3, lambda b: {k: v[:0] for k, v in b.items()})",
        True,
        ("stage 0, read of micro-batch 3", "{'x': 0, 'y': 0}"),
    ),
    "a batch without labels": (
        "batches=at(3, lambda b: {'x': b['x']})",
        True,
        ("stage 0, read of micro-batch 3", "'y'"),
    ),
    "a loss that is not finite": (
        "batches=at(3, lambda b: {'x': b['x'] * float('inf'), 'y': b['y']})",
        True,
        ("the loss of stage 1, micro-batch 3 (update 3)", "nan", "learning rate"),
    ),
    "the optimizer's step": ("optimizer=lambda n: Step(n, lr=0.1)", True, ("update of micro-batch 3", "no step")),
    "evaluate": ("evaluate=lambda m: fail('no score')", True, ("Job(evaluate=...) after update 4", "no score")),
    "a score without a name": ("evaluate=lambda m: {3: 0.5}", True, ("Job(evaluate=...) after update 4", "name 3 of")),
    "a score that is none": ("evaluate=lambda m: {'score': 'high'}", True, ("Job(evaluate=...)", "'high'")),
}


def whole_or_nothing(updates: bool) -> None:
    """Assert that no run folder is left, or one in which everything can be read."""
    runs = [entry for entry in Path("runs").iterdir() if not entry.is_symlink()] if Path("runs").exists() else []
    assert bool(runs) == updates
    for run in runs:
        assert (run / "plan.toml").read_text()
        assert read_metrics(run / "metrics.jsonl")
        assert not {entry.name for entry in run.iterdir()} - {"plan.toml", "metrics.jsonl", "checkpoint"}
        if is_checkpoint(run / "checkpoint"):
            assert json.loads((run / "checkpoint" / "checkpoint.json").read_text())["kind"] == "roundelay checkpoint"


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
@pytest.mark.parametrize("case", CASES)
def test_an_exception_on_a_worker_is_told_with_its_place(
    capsys: Capture, workplace: Path, case: str, transport: str
) -> None:
    changes, updates, words = CASES[case]
    job = job_file(workplace, changes, BEFORE)
    said = here(
        capsys, "train", job, "--workers", 2, "--steps", 5, "--no-baseline", "--transport", transport, "--rule", "1f1b",
        "--micro-batches", 1,
    )  # fmt: skip
    one_screen(said, *words)
    assert said.code == (2 if "batch" in case else 1)
    whole_or_nothing(updates)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_state_that_cannot_be_told_is_the_cause(capsys: Capture, workplace: Path, transport: str) -> None:
    seen = (
        "class Seen(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        super().step()\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']:\n"
        "                self.state[p]['seen'] = {1, 2}\n"
    )
    job = job_file(workplace, "optimizer=lambda n: Seen(n, lr=0.1)", seen)
    said = here(capsys, "train", job, *ASYNC, "--steps", 3, "--no-baseline", "--transport", transport)
    one_screen(said, "its state 'seen'", "a value of type set")
    assert said.code == 2


def test_a_showcase_that_raises_leaves_a_whole_run(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "showcase=lambda m: fail('no show')", BEFORE)
    said = here(capsys, "train", job, *ASYNC, "--steps", 2, "--no-baseline")
    one_screen(said, "Job(showcase=...)", "no show", "the run itself is complete")
    assert {"summary.json", "trace.json", "checkpoint"} <= set(os.listdir("runs/latest/"))


def test_a_showcase_shows_the_trained_model(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "showcase=lambda m: f'training: {m.training}'")
    said = here(capsys, "train", job, *ASYNC, "--steps", 2, "--no-baseline")
    assert "training: False" in said.out


def test_a_loss_that_fails_while_the_stages_are_measured_is_told(capsys: Capture, workplace: Path) -> None:
    before = (
        BEFORE
        + """
import inspect

def unmeasured(outputs, batch):
    measured = any(frame.filename.endswith("stage_profiler.py") for frame in inspect.stack(0))
    return fail("not here") if measured else mlp.loss(outputs, batch)
"""
    )
    job = job_file(workplace, "loss=unmeasured", before)
    said = here(capsys, "plan", job, "--workers", 2, "--micro-batches", 1)
    one_screen(said, "measuring the stages", "not here")


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_behind_the_end_shows_no_library_unloading(workplace: Path, raises: bool) -> None:
    """A launcher sends one to those that have ended by themselves, too; it ended in a traceback of torch's."""
    late = """
import atexit, os, signal, time
def late():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
atexit.register(late)
"""
    changes = "loss=lambda outputs, batch: outputs.nothing" if raises else ""
    job = job_file(workplace, changes, late)
    said = finish(start(workplace, "train", job, "--workers", 1, "--steps", 2, "--no-baseline"))
    assert said.code == -signal.SIGTERM
    assert "KeyboardInterrupt" not in said.err, said.err
    assert "Traceback" not in said.err, said.err


def test_a_signal_behind_the_end_loses_nothing_of_what_was_told(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    late = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
    job = job_file(workplace, "", late)
    said = finish(start(workplace, "train", job, "--workers", 1, "--steps", 2, "--no-baseline", "--json"))
    assert said.code == -signal.SIGTERM
    assert said.json["steps"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_falls_into_a_collection_is_not_lost(workplace: Path, number: signal.Signals) -> None:
    """Python itself drops what is raised there, and shows it."""
    collected = f"""
import os, signal, time
class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.{number.name})
        time.sleep(0.1)

def showcase(model):
    Collected()
    time.sleep(20)
"""
    job = job_file(workplace, "showcase=showcase", collected)
    said = finish(start(workplace, "train", job, "--workers", 1, "--steps", 2, "--no-baseline"), 40.0)
    assert said.code == 128 + number
    assert said.err.count("Interrupted.") == 1
    assert "ignored" not in said.err, said.err


@pytest.mark.parametrize(
    "does",
    [
        "pass",
        "raise TypeError('no size')",
        "raise TypeError('no size: \"KeyboardInterrupt: <EMPTY MESSAGE>\"') from None",
    ],
    ids=["drops it", "hides it", "quotes it"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_model_takes_for_its_own_is_not_lost(
    workplace: Path, does: str, number: signal.Signals
) -> None:
    """Capture tries again what torch could not trace, and torch itself makes a TypeError of an interrupt."""
    once = f"""
import os, pathlib, signal, time

class Once(nn.Linear):
    def forward(self, x):
        if not pathlib.Path("here").exists():
            pathlib.Path("here").touch()
            try:
                os.kill(os.getpid(), signal.{number.name})
                time.sleep(1)
            except KeyboardInterrupt:
                {does}
        return super().forward(x)
"""
    job = job_file(workplace, "model=nn.Sequential(Once(6, 16), nn.Linear(16, 3))", once)
    said = finish(
        start(workplace, "train", job, "--workers", 1, "--steps", 9999, "--no-baseline", "--out", "run"), 40.0
    )
    assert (workplace / "here").exists()
    assert said.code == 128 + number, said.err
    assert said.err.count("Interrupted.") == 1
    assert "Traceback" not in said.err, said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_becomes_an_error_of_the_job_s_is_the_cause_told(
    workplace: Path, number: signal.Signals
) -> None:
    hidden = f"""
import os, signal, time

def showcase(model):
    try:
        os.kill(os.getpid(), signal.{number.name})
        time.sleep(20)
    except KeyboardInterrupt:
        raise ValueError("mine") from None
"""
    job = job_file(workplace, "showcase=showcase", hidden)
    said = finish(start(workplace, "train", job, "--workers", 1, "--steps", 2, "--no-baseline"), 40.0)
    assert said.code == 128 + number, said.err
    assert said.err.count("Interrupted.") == 1
    assert "mine" not in said.err, said.err


@pytest.fixture
def alarm() -> Generator[None]:
    """What a test does to SIGALRM is undone."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_that_python_drops_is_raised_again_though_somebody_took_the_alarm(alarm: None) -> None:
    signals = Signals()
    signals.first = signal.SIGTERM
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signals._unraised(SimpleNamespace(exc_type=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        time.sleep(30)
    signals.leave_to(signal.SIG_DFL)
    signals._check(signal.SIGALRM, None)  # one that was under way
    assert signals.first == signal.SIGTERM


def test_an_interrupt_is_not_sent_again_into_what_it_leaves(workplace: Path) -> None:
    slow = """
import os, pathlib, signal, time

def showcase(model):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
    finally:
        time.sleep(1.5)
        pathlib.Path("left").touch()
"""
    job = job_file(workplace, "showcase=showcase", slow)
    said = finish(start(workplace, "train", job, "--workers", 1, "--steps", 2, "--no-baseline"), 40.0)
    assert said.code == 130
    assert said.err.count("Interrupted.") == 1
    assert (workplace / "left").exists()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGHUP"])
def test_a_worker_that_is_killed_is_told_before_those_that_miss_it(capsys: Capture, workplace: Path, name: str) -> None:
    before = (
        BEFORE
        + f"""
import signal

class Die(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        os.kill(os.getpid(), signal.{name})
        return grad

def loss(outputs, batch):
    return mlp.loss(Die.apply(outputs) if os.getpid() != HOME else outputs, batch)
"""
    )
    job = job_file(workplace, "loss=loss", before)
    for _ in range(3):  # who is heard first is chance
        options = ("--workers", 3, "--rule", "pipeoptim", "--transport", "gloo", "--check", "off")
        said = here(capsys, "train", job, *options, "--no-baseline", "--out", "run")
        one_screen(said, "worker 2 (process", f"was killed by {name}", "smaller micro-batches")
        assert said.code == 1
        shutil.rmtree("run", ignore_errors=True)


def test_a_disk_that_is_full_when_all_is_trained_costs_the_trace_and_nothing_else(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise RunError("trace.json", got="no space left", expected="room for it", remedy="Free some space.")

    monkeypatch.setattr(run_summary, "write_trace", full)
    job = job_file(workplace, "")
    one_screen(here(capsys, "train", job, "--no-baseline", "--steps", 3, "--out", workplace / "run"), "no space left")
    assert json.loads((workplace / "run" / "summary.json").read_text())["steps"] == 3
    assert (workplace / "run" / "checkpoint").is_dir()
