"""The machine is read as it is; what cannot be read raises nothing."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundelay import fork_safety
from roundelay.cores import core_quota
from roundelay.doctor import examine, fork_probe, read_machine
from roundelay.doctor.host import memory_limit, read_torch


def folder(root: Path, files: dict[str, str]) -> Path:
    """A folder of files by path."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "4:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/\n"
#: files below the root, what /proc/self/cgroup says -> cores' time, bytes
CGROUPS: dict[str, tuple[dict[str, str], str, float | None, int | None]] = {
    "version 2": ({"a/cpu.max": "150000 100000\n", "a/memory.max": "1000\n"}, "0::/a\n", 1.5, 1000),
    "version 2, no limit": ({"a/cpu.max": "max 100000\n", "a/memory.max": "max\n"}, "0::/a\n", None, None),
    "the tightest above": (
        {"cpu.max": "400000 100000", "a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000", "a/memory.max": "7"},
        "0::/a/b\n",
        0.5,
        7,
    ),
    "a path from outside": ({"cpu.max": "200000 100000", "memory.max": "9"}, "0::/docker/1234\n", 2.0, 9),
    "version 1": (
        {
            "cpu/job/cpu.cfs_quota_us": "300000\n",
            "cpu/job/cpu.cfs_period_us": "100000\n",
            "memory/job/memory.limit_in_bytes": "5000\n",
        },
        V1,
        3.0,
        5000,
    ),
    "version 1, no limit": (
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        V1,
        None,
        None,
    ),
    "nothing to read": ({}, V1, None, None),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_a_container_s_limits_are_read(tmp_path: Path, case: str) -> None:
    files, membership, cores, memory = CGROUPS[case]
    root = folder(tmp_path / "cgroup", files)
    (tmp_path / "self").write_text(membership)
    assert core_quota(root, tmp_path / "self") == cores
    assert memory_limit(root, tmp_path / "self") == memory


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert core_quota(tmp_path, tmp_path / "self") is None
    assert memory_limit(tmp_path, tmp_path / "self") is None


def test_cores_are_those_that_this_process_may_run_on() -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert read_machine().allowed_cores == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.torch.version is not None
    assert machine.torch.gloo
    assert machine.fork_error == ""
    assert machine.folder is not None
    assert machine.folder.free > 0
    assert machine.folder.path == str(Path.cwd())
    assert 0 < machine.allowed_cores <= machine.cores
    assert 0 < machine.free_memory <= machine.memory
    assert set(machine.interfaces) == {name for _, name in socket.if_nameindex()}
    assert machine.files is None or machine.files > 0
    assert {one.name for one in examine(machine) if one.state == "problem"} <= {"loopback", "disk"}


def test_torch_s_error_for_an_lstm_in_bf16_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: nn.LSTM, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive. Run again")
        return x

    monkeypatch.setattr(nn.LSTM, "forward", refuses)
    assert read_torch().bf16_lstm_error == "RuntimeError: could not create a primitive"


def test_a_folder_that_was_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    (disk,) = (one for one in examine(read_machine()) if one.name == "disk")
    assert disk.state == "problem"


def test_nothing_listens_but_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []
    real = socket.create_server

    def listen(address: tuple[str, int], **options: Any) -> socket.socket:
        bound.append(address[0])
        return real(address, **options)

    monkeypatch.setattr(socket, "create_server", listen)
    assert read_machine().loopback_error == ""
    assert bound == ["127.0.0.1"]


def test_a_loopback_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert "Cannot assign requested address" in read_machine().loopback_error


@pytest.mark.parametrize(
    ("variable", "value", "check", "part"),
    [
        ("TORCHELASTIC_RUN_ID", "test", "launcher", "TORCHELASTIC_RESTART_COUNT"),
        ("ROUNDELAY_DEBUG", "9", "variables", "ROUNDELAY_DEBUG: '9'"),
        ("ROUNDELAY_MALLOC", "no", "variables", "ROUNDELAY_MALLOC: 'no'"),
    ],
)
def test_variables_that_a_run_would_refuse_are_reported(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, check: str, part: str
) -> None:
    monkeypatch.setenv(variable, value)
    machine = read_machine()
    assert machine.launched is None
    assert set(machine.refused) == {check}
    assert part in machine.refused[check][0]


class Broken:
    """Fails whenever it is asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


def test_a_torch_that_is_broken_in_parts_is_read_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(__version__="2.13.0", distributed=Broken(), cuda=Broken(), version=Broken())
    monkeypatch.setitem(sys.modules, "torch_in_parts", broken)
    found = read_torch("torch_in_parts")
    assert (found.version, found.distributed, found.gloo, found.nccl, found.cuda) == (
        "2.13.0",
        False,
        False,
        False,
        None,
    )
    assert found.devices == ()
    assert "is broken" in found.device_error


def test_a_torch_without_distributed_has_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    without = SimpleNamespace(__version__="2.13.0", distributed=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch_without", without)
    found = read_torch("torch_without")
    assert (found.distributed, found.gloo, found.nccl) == (False, False, False)


def test_devices_and_what_torch_says_of_them_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30)
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_properties=lambda i: one)
    monkeypatch.setitem(sys.modules, "torch_with", SimpleNamespace(__version__="2.13.0", cuda=cuda))
    assert read_torch("torch_with").devices == (("NVIDIA H100", 80 << 30),) * 2


def test_a_torch_that_is_not_installed_is_reported() -> None:
    found = read_torch("no_such_torch")
    assert found.version is None
    assert "no_such_torch" in found.error


def test_a_fork_in_which_no_gradient_can_be_computed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_by, real = os.getpid(), fork_safety.one_backward

    def refused() -> None:
        generation = 1 if os.getppid() == tried_by else 2
        if generation == 2:
            raise RuntimeError("Unable to handle autograd's threading\nhere")
        real()

    monkeypatch.setattr(fork_safety, "one_backward", refused)
    assert read_machine().fork_error == "RuntimeError: Unable to handle autograd's threading here"


def test_a_forked_process_that_is_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_safety, "one_backward", lambda: os.kill(os.getpid(), 9))
    assert read_machine().fork_error == "it ends with -9"


def test_a_forked_process_that_hangs_is_killed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_by = os.getpid()
    monkeypatch.setattr(fork_probe, "_WORKER_S", 0.3)
    monkeypatch.setattr(fork_safety, "one_backward", lambda: None if os.getppid() == tried_by else time.sleep(60))
    started = time.monotonic()
    assert read_machine().fork_error == "it hangs"
    assert time.monotonic() - started < 20
