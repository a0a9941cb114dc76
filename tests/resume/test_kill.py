"""Kill -9 at any moment, also within a checkpoint, and a full disk: what goes on ends as if nothing had happened.

A few moments; ``python -m tests.resume.table`` takes 20 for each of four rules.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.checkpoint.checkpoint import load
from roundelay.errors import CheckpointError
from tests.faults.case import Server, members
from tests.resume import kill
from tests.resume.job import BATCHES
from tests.resume.kill import END_S, JOB, LATE, Case, Outcome, differences, losses_told, play, whole

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes"),
    pytest.mark.timeout(400),  # each starts the command three times: seconds, or minutes on a busy machine
]

CASES = (
    Case("pipeoptim", 3, 1, "shm", 2, 1, seed=4),
    Case("cdp-v2", 4, 3, "memory", 1, 1, seed=2, amid=True),
    Case("pipedream", 2, 1, "shm", 2, 1, seed=1, holders=("--data-parallel", 2, "--zero", 3)),
    Case("pipeoptim", 1, 1, "shm", 1, 1, seed=3, holders=("--hybrid", "2x2")),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_process_is_killed_and_the_run_goes_on(case: Case, tmp_path: Path, server: Server) -> None:
    outcome = play(case, tmp_path, server)
    assert not outcome.faults, outcome
    assert outcome.amid or not case.amid, "no kill fell into a checkpoint"


@pytest.mark.parametrize(("late", "played"), [(0, 1), (2, 3), (9, 5)])
def test_a_kill_that_came_too_late_shows_nothing_and_is_played_again_at_other_moments(
    late: int, played: int, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def once(case: Case, folder: Path, server: Server) -> Outcome:
        seeds.append(case.seed)
        return Outcome((), 0, 0, (LATE,) if len(seeds) <= late else ("another fault",))

    monkeypatch.setattr(kill, "play_once", once)
    outcome = play(CASES[0], tmp_path, server)
    assert outcome.faults == ((LATE,) if late > played else ("another fault",))
    assert len(set(seeds)) == len(seeds) == played


def test_a_kill_that_missed_its_checkpoint_is_played_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [Outcome((), 0, 0, ()), Outcome((), 0, 1, ())]
    monkeypatch.setattr(kill, "play_once", lambda case, folder, server: left.pop(0))
    assert play(CASES[1], tmp_path, server).amid == 1
    left = [Outcome((), 0, 0, ("a fault",))]
    assert play(CASES[1], tmp_path / "0", server).faults == ("a fault",)


@pytest.mark.parametrize(("rule", "micro_batches"), [("pipeoptim", 1), ("cdp-v2", 3)])
def test_a_run_that_restarts_itself_goes_on_in_mid_flight(
    rule: str, micro_batches: int, tmp_path: Path, server: Server
) -> None:
    case = Case(rule, 3, micro_batches, "shm", 1, 0, seed=0)
    expected = whole(case, tmp_path, server)
    run, hold = tmp_path / "run", tmp_path / "hold"
    hold.write_text("0")
    pid = server.train(tmp_path, *case.options(), "--out", "run", "--restarts", 2, job=JOB)
    kill_one(pid, run, 0, hold)
    kill_one(pid, run, BATCHES, hold)
    hold.unlink()
    assert server.wait(pid, END_S) == 0, (tmp_path / "err").read_text()
    said = (tmp_path / "err").read_text()
    going_on = [int(number) for number in re.findall(r"Restart \d: continuing after update (\d+)\.", said)]
    assert len(going_on) == 2
    assert all(number > 0 and number % BATCHES for number in going_on), "checkpoints within an epoch"
    assert "dropped" not in said
    assert differences(expected.end, load(run / "checkpoint")) == []
    assert list(losses_told(run).values()) == expected.losses


def kill_one(pid: int, run: Path, updates: int, hold: Path) -> None:
    """Kill a worker when there is a checkpoint of more updates, and wait until the others have ended.

    The run gets a few batches, and then one a second: on a slow disk it would leave checkpoints out, and be at its end.
    """
    began = time.monotonic()
    while saved(run) <= updates:
        assert members(pid)
        hold.write_text(str(updates + 8 + int(time.monotonic() - began)))
        time.sleep(0.005)
    alive = members(pid)
    os.kill(alive[2], signal.SIGKILL)
    while set(alive[1:]) & set(members(pid)):
        assert members(pid)
        time.sleep(0.005)


def saved(run: Path) -> int:
    """Updates of the newest checkpoint; 0 if there is none yet."""
    with contextlib.suppress(CheckpointError, FileNotFoundError):
        return load(run / "checkpoint").position.updates
    return 0


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, server: Server) -> None:
    case = Case("pipeoptim", 3, 1, "memory", 2, 0, seed=0)
    expected = whole(case, tmp_path, server)
    (tmp_path / "small").write_text("9")
    pid = server.train(tmp_path, *case.options(), "--out", "full", job=JOB)
    assert server.wait(pid, END_S) == 1 << 8  # its last checkpoint could not be written
    assert "No checkpoint at" in (tmp_path / "err").read_text()
    (tmp_path / "small").unlink()
    left = load(tmp_path / "full" / "checkpoint")
    assert 0 < left.position.updates <= 12
    assert left.flight is not None
    told = losses_told(tmp_path / "full")
    assert told == dict(enumerate(expected.losses[: len(told)]))
    pid = server.train(tmp_path, "--from", "full", "--out", "more", job=JOB)  # by its plan, and to its end
    said = (tmp_path / "err").read_text
    assert server.wait(pid, END_S) == 0, said()
    assert "dropped" not in said()
    assert losses_told(tmp_path / "more") == dict(list(enumerate(expected.losses))[left.position.updates :])
    assert differences(expected.end, load(tmp_path / "more" / "checkpoint")) == []
