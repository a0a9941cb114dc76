"""Outputs that are closed or full, and a system that starts no thread: the result is kept, and all is in words."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from roundelay.cli.output_streams import TolerantStream
from roundelay.runtime.processes.user_errors import out_of_threads, unexpected
from tests.cli.harness import MLP, PROGRAM, environment, here, one_screen


def shell(workplace: Path, redirections: str) -> subprocess.CompletedProcess[str]:
    """A small training, its output redirected."""
    command = [sys.executable, "-c", PROGRAM, "train", MLP, "--transport", "shm", "--steps", "2", "--no-baseline"]
    return subprocess.run(
        ["bash", "-c", f'"$0" "$@" --out run {redirections}', *command],
        cwd=workplace,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirections", "code"),
    [("2>&-", 0), ("2>/dev/full", 0), (">&-", 0), (">/dev/full", 1), (">&- 2>&- <&-", 0), (">/dev/full 2>&1", 1)],
)
def test_the_run_is_kept(workplace: Path, redirections: str, code: int) -> None:
    ran = shell(workplace, redirections)
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    assert json.loads((workplace / "run" / "summary.json").read_text())["steps"] == 2
    assert (workplace / "run" / "checkpoint" / "checkpoint.json").is_file()
    if redirections == ">/dev/full":
        told = " ".join(ran.stderr.split())
        assert "could be written to stdout: No space left on device. The command itself ended with 0." in told


def test_a_reader_that_has_had_enough_is_no_fault(workplace: Path) -> None:
    ran = shell(workplace, "| true")
    assert "could be written" not in ran.stderr


def test_what_fails_once_goes_nowhere_from_then_on(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        stream = TolerantStream(full)
        stream.write("a" * 100_000)
        stream.flush()
        assert stream.fault is not None
        stream.write("b")
        stream.flush()


def test_no_further_thread_is_told_as_that() -> None:
    told = out_of_threads("worker 1", RuntimeError("can't start new thread"))
    assert told is not None
    assert "ulimit -u" in told.remedy
    assert "thread" in unexpected("stage 0", RuntimeError("can't start new thread")).got
    assert out_of_threads("worker 1", RuntimeError("something else")) is None


def test_a_command_that_gets_no_thread_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    said = here(capsys, "train", MLP, "--steps", 2, "--no-baseline")
    one_screen(said, "cannot start another thread", "ulimit -u")
    assert said.code == 1
