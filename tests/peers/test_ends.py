"""How a hosted run ends before its time: a machine is killed or stopped, the host is, or somebody types Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from roundelay.checkpoint.checkpoint import load
from tests.cli.harness import Said, finish, job_file, start
from tests.conftest import nothing_left_behind
from tests.peers.hosted import PATIENCE_S, Hosted, hosting

pytestmark = pytest.mark.timeout(400)

EVERY, ENDLESS = 25, 1_000_000
KILLED_S, STOPPED_S, TYPED_S = 4.0, 10.0, 4.0
"""Seconds in which all must have ended after a machine is killed, is stopped, or Ctrl-C is typed."""

SLOW = """
import time
mlp.BATCHES = 400

def slowly(epoch):
    for batch in mlp.batches(epoch):
        time.sleep(0.01)
        yield batch
"""
"""At most a hundred updates a second, so that a checkpoint is written before the next is due."""

FAILS = """
def failing(epoch):
    for k, batch in enumerate(mlp.batches(epoch)):
        if k == 5:
            raise ValueError("no row is left")
        yield batch
"""


def training(folder: Path, out: str, *args: object, peers: int = 3) -> tuple[Hosted, list[subprocess.Popen[str]]]:
    """A run that has made updates since a checkpoint, and its machines."""
    job = job_file(folder, "batches=slowly", SLOW)
    run = hosting(folder, job, "--out", out, "--checkpoint-every", EVERY, *args, peers=peers)
    joined = [run.join(number) for number in range(peers - 1)]
    first = update(folder / out)
    until(lambda: update(folder / out) - max(first, saved(folder / out)) > EVERY // 2 and saved(folder / out) > 0, run)
    return run, joined


def until(holds: Callable[[], bool], run: Hosted) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert run.host.poll() is None, run.log.read_text()
        assert time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.02)


def update(out: Path) -> int:
    """The number of the last update that was written down."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return int(json.loads(whole[-1])["update"]) if whole else 0


def saved(out: Path) -> int:
    """The update of the checkpoint; 0 without one."""
    manifest = out / "checkpoint" / "checkpoint.json"
    return load(out / "checkpoint").position.updates if manifest.exists() else 0


def awaited(processes: Sequence[subprocess.Popen[str]], within_s: float) -> None:
    """Wait until all have ended; whoever has not, within so many seconds, is killed, and fails the test."""
    until_s = time.monotonic() + within_s
    try:
        for each in processes:
            each.wait(max(0.1, until_s - time.monotonic()))
    finally:
        for each in processes:
            each.kill()


def strike(
    run: Hosted, joined: Sequence[subprocess.Popen[str]], process: subprocess.Popen[str], number: int, within_s: float
) -> tuple[float, list[Said]]:
    """Send a signal; return when all had ended, and what they said: the host first."""
    begin = time.monotonic()
    os.kill(process.pid, number)
    awaited([run.host, *joined], within_s)
    took_s = time.monotonic() - begin
    said = run.ended(joined)
    assert not any("Traceback" in one.err for one in said), said
    return took_s, said


def lost(said: Said) -> list[str]:
    return [line for line in said.err.splitlines() if line.startswith("lost: ")]


def test_a_machine_that_is_killed_is_told_and_the_run_goes_on_with_others(tmp_path: Path) -> None:
    """With as many machines it goes on in mid-flight, which is proved; with fewer, drained."""
    out = tmp_path / "R"
    with nothing_left_behind():
        run, joined = training(tmp_path, "R", "--steps", ENDLESS)
        _, (host, one, two) = strike(run, joined, joined[1], signal.SIGKILL, KILLED_S)
    assert (host.code, one.code, two.code) == (1, 1, -signal.SIGKILL)
    for told in (host, one):
        assert [line.startswith("lost: worker-2: ") for line in lost(told)] == [True], told.err
    assert 0 <= update(out) - saved(out) <= EVERY
    began = shutil.copytree(out / "checkpoint", tmp_path / "began")
    assert load(began).flight is not None
    shutil.copy(out / "plan.toml", tmp_path)

    with nothing_left_behind():
        run, joined = training(tmp_path, "R2", "--steps", ENDLESS, "--from", "began")
        reached = update(tmp_path / "R2")
        _, told = strike(run, joined, run.host, signal.SIGTERM, PATIENCE_S)
    assert "dropped" not in told[0].err
    assert [each.code for each in told[1:]] == [0, 0], told
    assert told[0].code != 0
    for each in told[1:]:
        assert "The host was asked to end" in each.err
        assert not lost(each)
    assert saved(tmp_path / "R2") >= reached > saved(out)
    proof = finish(start(tmp_path, "verify", "job.py", "--trace", "R2", "--from", "began"), PATIENCE_S)
    assert proof.code == 0, proof.told
    assert "bit-equal" in proof.out

    steps = 2 * EVERY
    with nothing_left_behind():
        run = hosting(tmp_path, "job.py", "--out", "R3", "--from", "R2", "--steps", steps, "--json", peers=2)
        host, one = run.ended([run.join(0)])
    assert (host.code, one.code) == (0, 0), host.err + one.err
    assert host.err.count("in flight are dropped and start again: ") == 1, host.err
    assert update(tmp_path / "R3") == saved(tmp_path / "R2") + steps - 1


def test_a_host_that_is_killed_is_told_by_all(tmp_path: Path) -> None:
    with nothing_left_behind():
        run, joined = training(tmp_path, "R", "--steps", ENDLESS)
        _, (host, *others) = strike(run, joined, run.host, signal.SIGKILL, KILLED_S)
    assert [host.code, *(each.code for each in others)] == [-signal.SIGKILL, 1, 1]
    for each in others:
        assert [line.startswith("lost: host: ") for line in lost(each)] == [True], each.err


def test_what_fails_on_the_host_is_told_by_all(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, job_file(tmp_path, "batches=failing", FAILS), "--out", "R", "--steps", 50)
        said = run.ended([run.join(number) for number in range(2)])
    assert [each.code for each in said] == [1, 1, 1], said
    for each in said:
        (line,) = lost(each)
        assert line.startswith("lost: host: ")
        assert "no row is left" in line
        assert "Traceback" not in each.err


def test_a_machine_that_is_stopped_is_told_and_ends_when_it_goes_on(tmp_path: Path) -> None:
    with nothing_left_behind():
        run, joined = training(tmp_path, "R", "--steps", ENDLESS, peers=2)
        stopped = joined[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        run.host.wait(STOPPED_S)
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.wait(STOPPED_S)
        host, one = run.ended(joined)
    assert host.code == 1
    assert [line.startswith("lost: worker-1: ") for line in lost(host)] == [True], host.err
    assert one.code not in (0, None)
    assert "Traceback" not in host.err + one.err


def test_machines_that_stay_stopped_end_themselves(tmp_path: Path) -> None:
    """Each of them, as its own watchdog says: nobody else is left to tell it."""
    with nothing_left_behind():
        run, joined = training(tmp_path, "R", "--steps", ENDLESS, peers=2)
        for process in (run.host, *joined):
            os.kill(process.pid, signal.SIGSTOP)
        awaited([run.host, *joined], STOPPED_S)
        said = run.ended(joined)
    assert [each.code for each in said] == [-signal.SIGKILL] * 2, said
    for each, name, process in zip(said, ("host", "worker-1"), (run.host, *joined), strict=True):
        assert f"roundelay: {name} (process {process.pid}) was stopped by a signal and not continued" in each.err


def test_ctrl_c_ends_at_once_whoever_waits(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, job_file(tmp_path, "batches=slowly", SLOW), "--out", "R")
        joined = [run.join(0)]
        until(lambda: "worker-1 has joined" in run.log.read_text(), run)
        time.sleep(1.0)
        for process in (joined[0], run.host):
            os.kill(process.pid, signal.SIGINT)
            process.wait(TYPED_S)
        said = run.ended(joined)
    assert [each.code for each in said] == [130, 130], said
    assert not any("Traceback" in each.err for each in said), said
    assert not (tmp_path / "R").exists()
