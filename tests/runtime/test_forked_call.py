"""Calls in a forked child, and what makes a process one that can be forked (docs/design/0012-autograd-and-fork.md)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from roundelay.errors import CaptureError, RunError, UsageError, UserCodeError
from roundelay.launching import forked_call as module
from roundelay.launching.forked_call import apart, check_transport, forked_backward_error, isolated
from tests.runtime.interrupts import handled

ROOT = Path(__file__).resolve().parents[2]


def beside_a_device(when: str, recipe: str) -> dict[str, Any]:
    """What a recipe of the stand-in finds."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.runtime.stand_in", when, recipe],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("when", ["early", "late"])
def test_processes_run_and_are_proved_under_every_rule_beside_an_accelerator(when: str) -> None:
    found = beside_a_device(when, "rules")
    assert len(found) >= 14
    assert set(found.values()) == {True}


def test_what_else_forks_or_computes_gradients_works_beside_an_accelerator() -> None:
    assert beside_a_device("early", "around") == {"plain PyTorch": True, "updates": 4, "goes on": True}


def test_workers_compile_for_themselves_beside_an_accelerator() -> None:
    assert beside_a_device("early", "compiled") == {"equal": True, "difference": ""}


def test_a_process_that_has_trained_beside_an_accelerator_is_refused_in_words_and_memory_works() -> None:
    found = beside_a_device("early", "own_backward")
    assert found.pop("memory") == "True"
    for transport, said in found.items():
        assert said.startswith(f"UsageError: transport {transport} in this process")
        for word in ("torchrun", "roundelay train JOB.py", 'transport="memory"'):
            assert word in said


def test_without_an_accelerator_the_person_may_have_trained_before() -> None:
    assert set(beside_a_device("late", "own_backward").values()) == {"True"}


@pytest.mark.parametrize("line", ["import torch, roundelay", "import roundelay; roundelay.Job"])
def test_importing_roundelay_starts_autograd_where_there_is_no_device(line: str) -> None:
    program = f"{line}; import sys; sys.exit('roundelay.fork_safety' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=100).returncode == 0


def test_what_a_call_returns_comes_back_exactly() -> None:
    value = {"a": [0.1 + 0.2, 1e-300, True, None, "ü"], "b": {"c": -3}}
    assert isolated(lambda: value, "a test") == value


def test_a_call_happens_in_another_process_with_one_thread() -> None:
    pid, threads = isolated(lambda: [os.getpid(), torch.get_num_threads()], "a test")
    assert pid != os.getpid()
    assert threads == 1


def test_apart_is_here_where_that_spoils_nothing_and_in_a_child_where_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart(os.getpid, "a test") == os.getpid()
    monkeypatch.setattr(module, "STARTED_WITHOUT_DEVICES", False)
    assert apart(os.getpid, "a test") != os.getpid()


def test_an_error_of_ours_comes_back_as_what_it_is() -> None:
    def fails() -> None:
        raise CaptureError("a stage", got="nothing", expected="something", remedy="Do it.")

    with pytest.raises(CaptureError) as told:
        isolated(fails, "a test")
    assert (told.value.subject, told.value.got, told.value.remedy) == ("a stage", "nothing", "Do it.")


def test_another_error_is_told_with_what_was_done_and_where() -> None:
    def fails() -> None:
        raise ZeroDivisionError("by hand")

    with pytest.raises(UserCodeError, match="a test") as told:
        isolated(fails, "a test")
    assert "ZeroDivisionError: by hand" in told.value.got
    assert Path(__file__).name in told.value.got


def test_a_child_that_is_killed_is_told_by_its_signal() -> None:
    with pytest.raises(RunError, match="SIGKILL"):
        isolated(lambda: os.kill(os.getpid(), signal.SIGKILL), "a test")


def test_a_child_that_ends_without_a_word_is_told() -> None:
    with pytest.raises(RunError, match="without an answer"):
        isolated(lambda: os._exit(0), "a test")


def test_a_child_that_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no answer for 0\.3 s"):
        isolated(lambda: time.sleep(60), "a test", limit_s=0.3)
    assert time.monotonic() - began < 10


def test_an_interrupt_ends_the_child_and_leaves_no_file() -> None:
    files = len(os.listdir("/proc/self/fd"))
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with handled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        isolated(lambda: time.sleep(60), "a test")
    timer.join()
    assert len(os.listdir("/proc/self/fd")) == files


def test_this_process_can_be_forked() -> None:
    assert forked_backward_error() == ""


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_where_nothing_can_be_forked_processes_are_refused_in_words(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(UsageError, match="processes cannot be forked") as told:
        check_transport(transport)
    assert "--transport memory" in told.value.remedy
    check_transport("memory")
