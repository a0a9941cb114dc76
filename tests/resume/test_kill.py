"""Kill -9 at any moment, also within a checkpoint, and a full disk: what goes on ends as if nothing had happened.

A few moments; ``python -m tests.resume.table`` takes 20 for each of four rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.observe.checkpoint import load
from tests.faults.case import Server
from tests.resume.kill import END_S, JOB, Case, differences, play, whole

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes"),
    pytest.mark.timeout(400),  # each starts the command three times: seconds, or minutes on a busy machine
]

CASES = (
    Case("pipeoptim", 3, 1, "shm", 2, 1, seed=4),
    Case("cdp-v2", 4, 3, "memory", 1, 1, seed=2, amid=True),
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
    pid = server.train(tmp_path, "--from", "full", "--out", "more", job=JOB)  # by its plan, and to its end
    assert server.wait(pid, END_S) == 0, (tmp_path / "err").read_text()
    assert differences(expected.end, load(tmp_path / "more" / "checkpoint")) == []
