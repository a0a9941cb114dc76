"""`--transport nccl` without a launcher: this command starts a process for each device of the host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from roundelay.cli import own_processes as own
from roundelay.errors import UsageError
from roundelay.planner.plan_options import Choices
from tests.lower.plans import plan_of


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "num_cuda_devices", lambda: 4)


@pytest.mark.parametrize(
    ("choices", "count"),
    [
        ({}, 4),
        ({"workers": 3}, 3),
        ({"data_parallel": 2}, 4),
        ({"data_parallel": 2, "workers": 1}, 2),
        ({"data_parallel": 2, "tensor_parallel": 2}, 4),
        ({"layout": "dp"}, 4),
        ({"layout": "dp", "micro_batches": 2}, 2),
    ],
    ids=str,
)
def test_one_for_each_worker_and_a_worker_for_each_device(
    choices: dict[str, Any], count: int, four_devices: None
) -> None:
    assert own.own_processes(Choices(transport="nccl", **choices), None) == count


def test_none_for_another_transport_or_under_a_launcher(monkeypatch: pytest.MonkeyPatch, four_devices: None) -> None:
    assert own.own_processes(Choices(transport="memory"), None) == 0
    assert own.own_processes(Choices(), None) == 0
    for name, value in own._told(1, 4, ("127.0.0.1", 29500)).items():
        monkeypatch.setenv(name, value)
    assert own.own_processes(Choices(transport="nccl"), None) == 0


def test_as_many_as_a_plan_over_nccl_has_workers(tmp_path: Path, four_devices: None) -> None:
    plan = plan_of("1f1b", 3, 2)
    for transport, count in (("nccl", 3), ("memory", 0)):
        file = tmp_path / f"{transport}.toml"
        file.write_text(plan.text().replace('transport = "memory"', f'transport = "{transport}"'))
        assert own.own_processes(Choices(), file) == count


def test_a_run_over_nccl_goes_on_in_as_many(tmp_path: Path, four_devices: None) -> None:
    """Without --transport, from its folder or a checkpoint in it; other numbers may be given."""
    text = plan_of("1f1b", 3, 2).text().replace('transport = "memory"', 'transport = "nccl"')
    (tmp_path / "plan.toml").write_text(text)
    assert own.own_processes(Choices(), None, tmp_path) == 3
    assert own.own_processes(Choices(), None, tmp_path / "checkpoint") == 3
    assert own.own_processes(Choices(workers=2), None, tmp_path) == 2
    assert own.own_processes(Choices(transport="memory"), None, tmp_path) == 0


def test_a_single_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "num_cuda_devices", lambda: 1)
    with pytest.raises(UsageError, match=r"1 worker, and 1 CUDA device here.*Leave --transport out"):
        own.own_processes(Choices(transport="nccl"), None)


def test_more_workers_than_devices_are_refused(four_devices: None) -> None:
    with pytest.raises(UsageError, match=r"6 workers, and 4 CUDA devices here"):
        own.own_processes(Choices(transport="nccl", data_parallel=2, workers=3), None)


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, count: int = 3) -> int:
    """Run a program as so many processes; each writes a file named by its rank."""
    monkeypatch.setattr(own, "ENTRY", ("-c", f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{code}"))
    monkeypatch.chdir(tmp_path)
    return own.run_processes(count, ["train", "job.py"])


def test_each_is_this_command_and_is_told_which_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = "(sys.argv[1:], sorted(set(os.environ) & NAMES), os.environ['WORLD_SIZE'])"
    told = f"open(f'told{{rank}}', 'w').write(repr({seen}))"
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert run(monkeypatch, tmp_path, f"NAMES = {names}\n{told}") == 0
    for rank in range(3):
        assert (tmp_path / f"told{rank}").read_text() == repr((["train", "job.py"], sorted(names), "3"))


def test_the_first_one_s_exit_code_is_the_command_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, "sys.exit(2 if rank == 0 else 1)") == 2
    assert run(monkeypatch, tmp_path, "sys.exit(7 if rank == 2 else 0)") == 7
    assert run(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None") == 137


def test_when_one_fails_the_others_may_end_by_themselves_and_else_are_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(own, "AFTER_S", 0.5)
    monkeypatch.setattr(own, "KILL_S", 1.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN) if rank == 2 else None\n"
    began = time.monotonic()
    assert run(monkeypatch, tmp_path, deaf + "sys.exit(3) if rank == 0 else time.sleep(60)") == 3
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals) -> None:
    def strike() -> None:
        while len(list(tmp_path.glob("ready*"))) < 3:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=strike, daemon=True).start()
    heard = f"signal.signal({int(number)}, lambda *_: sys.exit(40 + rank))\nopen(f'ready{{rank}}', 'w')\ntime.sleep(60)"
    before = signal.getsignal(number)
    assert run(monkeypatch, tmp_path, heard) == 40
    assert signal.getsignal(number) is before


def test_they_end_with_this_process(tmp_path: Path) -> None:
    """Even if that is killed."""
    source = (
        "import sys; from roundelay.cli import own_processes as own\n"
        "own.ENTRY = ('-c', \"import os, time; open('pid' + os.environ['RANK'], 'w').write(str(os.getpid())); "
        'time.sleep(60)")\n'
        "own.run_processes(2, [])"
    )
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", source], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = [int(file.read_text()) for file in files]
    finally:
        parent.kill()
        parent.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
