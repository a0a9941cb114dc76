"""Whatever strikes a run, at whatever moment: it ends soon, tells one cause, leaves nothing behind, and can go on.

A few cases that are told apart, and a few at random; ``make faults`` strikes more than a hundred.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundelay.cli.app import app
from roundelay.schedules import LAYOUTS
from tests.faults.case import JOB, Case, Server, draw, members, play
from tests.faults.job import BATCHES, EPOCHS

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")

#: Seconds for an end that should take ten at most (``make faults`` asks for that): tests share the machine.
END_S = 40.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_a_fault_at_random_ends_a_run_well(seed: int, tmp_path: Path, server: Server) -> None:
    case = draw(seed)
    outcome = play(case, tmp_path, server, go_on=seed % 3 == 0, end_s=END_S)
    assert not outcome.faults, f"{case}: {outcome.faults}\n{outcome.said}"


@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize(
    ("moment", "transport"), [("start", "gloo"), ("start", "shm"), ("training", "shm"), ("training", "grpc")]
)
def test_a_signal_to_a_worker_is_told_with_its_number(
    fault: str, moment: str, transport: str, tmp_path: Path, server: Server
) -> None:
    number = {"start": 0, "training": 9}[moment]
    case = Case(transport, 3, moment, 1, fault, number, 0.0)
    if moment == "start":  # as soon as the workers are there
        pid = server.train(tmp_path, "--workers", 3, "--transport", transport, "--epochs", 400, "--out", "run")
        while len(members(pid)) < 4:
            assert members(pid)
        os.kill(members(pid)[2], getattr(signal, fault))
        assert server.wait(pid, END_S) == 1 << 8
        assert not members(pid)
        said = (tmp_path / "err").read_text()
    else:
        outcome = play(case, tmp_path, server, go_on=False, end_s=END_S, epochs=400)
        assert not outcome.late
        assert not outcome.faults, outcome
        said = outcome.said
    assert "worker 1 (process" in said
    assert ("stopped" if fault == "SIGSTOP" else fault) in said


def test_a_run_restarts_from_its_checkpoint_by_itself(tmp_path: Path, server: Server) -> None:
    epochs = 40
    how = ("--workers", 2, "--transport", "gloo", "--epochs", epochs)
    pid = server.train(tmp_path, *how, "--out", "run", "--restarts", 2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for kills in (1, 2):
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 8 * kills):
            assert members(pid)
        while len(alive := members(pid)) < 3:  # the second time, its workers may not have been forked yet
            assert alive
        os.kill(alive[1], signal.SIGKILL)
        while set(alive) & set(members(pid)) - {pid}:
            assert members(pid)
    assert server.wait(pid, 60.0) == 0
    assert [json.loads(line)["update"] for line in metrics.read_text().splitlines()] == list(range(epochs * BATCHES))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == epochs * BATCHES
    assert (tmp_path / "err").read_text().count("Restart ") == 2


def test_a_checkpoint_that_finds_no_room_leaves_the_old_one_and_says_so(tmp_path: Path, server: Server) -> None:
    (tmp_path / "small").write_text("3")
    pid = server.train(tmp_path, "--workers", 2, "--epochs", EPOCHS, "--out", "run")
    assert server.wait(pid, 60.0) == 1 << 8  # its last checkpoint could not be written
    said = (tmp_path / "err").read_text()
    assert said.count("No checkpoint at") >= 1
    assert (tmp_path / "run" / "checkpoint" / "checkpoint.json").exists()
    (tmp_path / "small").unlink()
    again = server.train(tmp_path, "--workers", 3, "--from", "run", "--steps", 2, "--out", "more")
    assert server.wait(again, 60.0) == 0


@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_of_any_layout_may_die_and_the_run_goes_on_bit_by_bit(
    layout: str, victim: int, tmp_path: Path, server: Server
) -> None:
    chosen = ("--layout", layout, "--rule", "cdp-v2", "--micro-batches", 2, "--cuts", "equal", "--transport", "shm")
    pid = server.train(tmp_path, *chosen, "--epochs", 400, "--checkpoint-every", 4, "--out", "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 12):
        assert members(pid)
    os.kill(members(pid)[1:][victim], signal.SIGKILL)
    assert server.wait(pid, END_S) == 1 << 8
    assert not members(pid)
    told = CliRunner().invoke(app, ["verify", str(JOB), "--from", str(tmp_path / "run"), "--steps", "5"])
    assert told.exit_code == 0, told.output
    assert "bit-equal" in told.output
