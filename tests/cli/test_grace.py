"""A scheduler's signal, to all processes of a run: a checkpoint is written, and the run goes on from it bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from roundelay.checkpoint import checkpoint
from roundelay.checkpoint.checkpoint import Checkpoint
from roundelay.cli.signals import Grace, Signals
from roundelay.observe.metrics_file import read_metrics
from tests.cli.harness import Said, environment, finish, job_file, start
from tests.cli.test_torchrun import ending, torchrun

SLOWLY = """
import time
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x[0] > 0).long()}
"""
LOADER = "batches=lambda epoch: DataLoader(Rows(), batch_size=8, num_workers={}), optimizer=lambda named: "
LOADER += "torch.optim.SGD(named, lr=0.05, momentum=0.9)"
EPOCHS = 400


def updates(folder: Path) -> int:
    """Updates that the run in a folder has told."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def under_way(process: subprocess.Popen[str], run: Path, least: int = 12) -> None:
    """Wait until the run has made a few updates."""
    deadline = time.monotonic() + 60
    while updates(run) < least:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def training(workplace: Path, transport: str, *more: object, loaders: int = 2) -> Iterator[subprocess.Popen[str]]:
    """A run under way in a process group of its own, which is gone afterwards."""
    job = job_file(workplace, LOADER.format(loaders), SLOWLY)
    options = (
        "--workers",
        2,
        "--rule",
        "pipeoptim",
        "--transport",
        transport,
        "--epochs",
        EPOCHS,
        "--no-baseline",
        "--out",
        "run",
    )
    process = start(workplace, "train", job, *options, *more)
    try:
        under_way(process, workplace / "run")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        process.wait()


def asked(process: subprocess.Popen[str], number: signal.Signals) -> Said:
    """What a run says that a signal to its whole group has ended."""
    os.killpg(process.pid, number)
    return finish(process, 30.0)


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_a_signal_to_the_whole_group_leaves_a_checkpoint_that_the_run_goes_on_from_bit_for_bit(
    workplace: Path, transport: str
) -> None:
    with training(workplace, transport) as process:
        before = updates(workplace / "run")
        said = asked(process, signal.SIGTERM)
    assert said.code == 143, said.err
    assert "Traceback" not in said.err, said.err
    left = checkpoint.load(workplace / "run" / "checkpoint")
    done = left.position.updates
    assert done >= before
    assert f"the checkpoint after update {done - 1} is written. Continue with --from run" in said.told
    assert left.flight is not None
    again = finish(start(workplace, "train", "job.py", "--from", "run", "--steps", 5, "--out", "on", "--no-baseline"))
    assert again.code == 0, again.err
    plan = ("--plan", "run/plan.toml", "--no-baseline")
    whole = finish(start(workplace, "train", "job.py", *plan, "--steps", done + 5, "--out", "whole"))
    assert whole.code == 0, whole.err
    _same(checkpoint.load(workplace / "on" / "checkpoint"), checkpoint.load(workplace / "whole" / "checkpoint"))


def _same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.position == other.position
    assert all(torch.equal(one.parameters[name], value) for name, value in other.parameters.items())
    assert all(torch.equal(one.buffers[name], value) for name, value in other.buffers.items())


def test_a_second_signal_ends_at_once(workplace: Path) -> None:
    with training(workplace, "shm", "--grace-s", 60) as process:
        os.killpg(process.pid, signal.SIGSTOP)  # so that both are there before anything is done about the first
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGCONT)
        said = finish(process, 10.0)
    assert said.code in (130, 143)
    assert "is written" not in said.err
    assert said.err.count("Interrupted.") == 1


def test_no_grace_no_checkpoint(workplace: Path) -> None:
    with training(workplace, "shm", "--grace-s", 0) as process:
        said = asked(process, signal.SIGTERM)
    assert said.code == 143
    assert "is written" not in said.err


def test_sigusr1_is_taken_if_asked_for(workplace: Path) -> None:
    with training(workplace, "shm", "--usr1") as process:
        said = asked(process, signal.SIGUSR1)
    assert said.code == 128 + signal.SIGUSR1
    assert "is written" in said.err


def test_sigusr1_is_left_alone_if_not(workplace: Path) -> None:
    with training(workplace, "shm") as process:
        said = asked(process, signal.SIGUSR1)
    assert said.code == -signal.SIGUSR1


def test_a_worker_alone_is_deaf_to_it(workplace: Path) -> None:
    with training(workplace, "shm", loaders=0) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        under_way(process, workplace / "run", updates(workplace / "run") + 20)


def test_what_takes_longer_than_the_grace_is_interrupted() -> None:
    program = """
import signal, sys, time
from roundelay.cli.signals import Grace, Signals
signals = Signals()
signals.listen()
asked = []
with signals.gracefully(Grace(0.5), lambda: asked.append(1), lambda: True):
    print("here", flush=True)
    began = time.monotonic()
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        signals.leave_to(signal.SIG_IGN)
        print(asked, 0.4 < time.monotonic() - began < 10, signals.cause)
"""
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == "[1] True 15\n"


def test_nothing_to_save_is_nothing_to_wait_for() -> None:
    signals = Signals()
    with (
        signals.gracefully(Grace(60.0), lambda: pytest.fail("asked"), lambda: False),
        pytest.raises(KeyboardInterrupt),
    ):
        signals._raise(signal.SIGTERM, None)
    signals.leave_to(signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    assert signals.first == signal.SIGTERM


def test_under_torchrun_the_leader_saves_and_all_end(workplace: Path) -> None:
    job = job_file(workplace, LOADER.format(2), SLOWLY)
    launcher = ["--standalone", "--nproc-per-node", "2"]
    process = torchrun(workplace, launcher, job, "--no-baseline", "--epochs", EPOCHS, "--out", "run")
    with ending(process):
        under_way(process, workplace / "run")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=40)
    assert "is written. Continue with --from run" in " ".join(out.split()), out
    assert checkpoint.load(workplace / "run" / "checkpoint").flight is not None
    told = read_metrics(workplace / "run" / "metrics.jsonl")
    assert len(told) >= 12
