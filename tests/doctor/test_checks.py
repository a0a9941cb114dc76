"""Every warning and problem of the doctor, each on a machine with one thing wrong."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from roundelay import env
from roundelay.detect_launcher import Launched
from roundelay.doctor import HostFacts, examine
from roundelay.doctor.checks import TORCH, size
from roundelay.doctor.host import Space, Torch
from tests.doctor.machines import GIB, WELL, findings, spoiled
from tests.test_house import PACKAGE, ROOT

SHM = Space(path="/dev/shm", total=64 << 20, free=64 << 20, writable=True)
HOME = WELL.folder
assert HOME is not None
H100 = ("NVIDIA H100", 80 * GIB)
ABSENT = Torch(error="ImportError: libtorch.so: cannot open shared object file")

#: what is wrong -> the machine, the check that must report it, its state, and parts of its text
WRONG: dict[str, tuple[HostFacts, str, str, tuple[str, ...]]] = {
    "torch is too old": (spoiled(torch={"version": "2.10.1"}), "torch", "problem", ("2.10.1", "torch>=2.11,<2.15")),
    "torch is too new": (spoiled(torch={"version": "2.15.0"}), "torch", "problem", ("2.15.0", "torch>=2.11,<2.15")),
    "a version that is none": (spoiled(torch={"version": "git-1234"}), "torch", "problem", ("git-1234",)),
    "torch is broken": (spoiled(torch=ABSENT), "torch", "problem", ("libtorch.so: cannot open", "pip install")),
    "nothing of ours can be loaded": (
        spoiled(commands_error="ModuleNotFoundError: No module named 'safetensors'"),
        "roundelay",
        "problem",
        ("safetensors", "pip check"),
    ),
    "devices without torch": (spoiled(torch=ABSENT), "devices", "warning", ("not known without torch",)),
    "a driver, and torch without CUDA": (
        spoiled(driver=True),
        "devices",
        "warning",
        ("built without CUDA", "get-started"),
    ),
    "a driver that is too old for torch": (
        spoiled(driver=True, torch={"cuda": "13.0", "device_error": "driver too old"}),
        "devices",
        "warning",
        ("built for CUDA 13.0", "driver too old"),
    ),
    "bf16 without torch": (spoiled(torch=ABSENT), "bf16", "warning", ("not known without torch",)),
    "no LSTM in bf16": (
        spoiled(torch={"bf16_lstm_error": "RuntimeError: could not create a primitive"}),
        "bf16",
        "warning",
        ("could not create a primitive", "leave `--precision` out"),
    ),
    "backends without torch": (spoiled(torch=ABSENT), "backends", "warning", ("not known without torch",)),
    "no torch.distributed": (
        spoiled(torch={"distributed": False, "gloo": False}),
        "backends",
        "problem",
        ("no torch.distributed", "--transport gloo"),
    ),
    "no gloo": (spoiled(torch={"gloo": False}), "backends", "problem", ("without gloo",)),
    "no NCCL beside devices": (spoiled(torch={"devices": (H100,)}), "backends", "warning", ("no NCCL",)),
    "no compiler": (spoiled(compiler=None), "C++ compiler", "warning", ("none", "g++")),
    "an unusable launcher": (
        spoiled(refused={"launcher": ("a launcher without a store of its own", "Use torchrun")}),
        "launcher",
        "problem",
        ("without a store", "Use torchrun"),
    ),
    "an interface that is not there": (
        spoiled(settings={"GLOO_SOCKET_IFNAME": "ib0"}),
        "network",
        "problem",
        ("ib0", "lo, eth0", "unset it"),
    ),
    "an unknown variable": (
        spoiled(settings={"ROUNDELAY_DEBUGG": "1"}),
        "variables",
        "warning",
        ("ROUNDELAY_DEBUGG=1", "without effect", "ROUNDELAY_DEBUG, "),
    ),
    "a variable that is refused": (
        spoiled(refused={"variables": ("ROUNDELAY_DEBUG: '9'", "Set it to one of 0, 1.")}),
        "variables",
        "problem",
        ("ROUNDELAY_DEBUG: '9'", "one of 0, 1"),
    ),
    "one core": (spoiled(cores=1, allowed_cores=1), "cores", "warning", ("1", "share a core")),
    "one core of many": (
        spoiled(allowed_cores=1),
        "cores",
        "warning",
        ("8, but", "may run on 1", "taskset"),
    ),
    "a container's share of cores": (
        spoiled(core_quota=1.5),
        "cores",
        "warning",
        ("1.5 cores' time", "--cpus"),
    ),
    "little memory": (
        spoiled(free_memory=512 << 20),
        "memory",
        "warning",
        ("512 MiB available", "End other programs"),
    ),
    "a container's memory": (
        spoiled(memory_limit=512 << 20),
        "memory",
        "warning",
        ("limit of the container 512 MiB", "docker run --memory"),
    ),
    "no gradients after a fork": (
        spoiled(fork_error="RuntimeError: Unable to handle autograd's threading"),
        "processes",
        "problem",
        ("cannot compute gradients: RuntimeError: Unable", "--transport memory", "torchrun"),
    ),
    "no loopback": (
        spoiled(loopback_error="Cannot assign requested address"),
        "loopback",
        "problem",
        ("Cannot assign requested address", "ip link set lo up"),
    ),
    "no shared memory": (spoiled(shm=None), "shared memory", "warning", ("no /dev/shm", "tmpfs")),
    "shared memory that cannot be written": (
        spoiled(shm=replace(SHM, writable=False)),
        "shared memory",
        "warning",
        ("cannot be written",),
    ),
    "docker's shared memory": (spoiled(shm=SHM), "shared memory", "warning", ("64 MiB", "--shm-size=1g")),
    "full shared memory": (
        spoiled(shm=replace(SHM, total=16 * GIB)),
        "shared memory",
        "warning",
        ("16.0 GiB, 64 MiB free", "Remove"),
    ),
    "a folder that was removed": (spoiled(folder=None), "disk", "problem", ("the current folder cannot be written",)),
    "a folder of another user": (
        spoiled(folder=replace(HOME, writable=False)),
        "disk",
        "problem",
        ("/home/me cannot be written", "--out"),
    ),
    "a full disk": (spoiled(folder=replace(HOME, free=0)), "disk", "problem", ("0 MiB free", "Free some space")),
    "an almost full disk": (spoiled(folder=replace(HOME, free=GIB // 2)), "disk", "warning", ("512 MiB free",)),
    "few open files": (spoiled(files=128), "limits", "warning", ("open files 128", "ulimit -n")),
    "few processes": (spoiled(processes=64), "limits", "warning", ("threads 64", "ulimit -u")),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_found_with_its_remedy(case: str) -> None:
    machine, name, state, words = WRONG[case]
    finding = findings(machine)[name]
    assert finding.state == state
    assert finding.remedy
    for word in words:
        assert word in f"{finding.found} | {finding.remedy}"


@pytest.mark.parametrize("case", WRONG)
def test_nothing_else_is_blamed_for_it(case: str) -> None:
    machine, name, _, _ = WRONG[case]
    expected = {name, "torch", "devices", "bf16", "backends"} if machine.torch.version is None else {name}
    assert {finding.name for finding in examine(machine) if finding.state != "ok"} == expected


#: what is unusual but not wrong -> the machine, the check, and a part of its text
RIGHT: dict[str, tuple[HostFacts, str, str]] = {
    "devices": (
        spoiled(driver=True, torch={"devices": (H100,), "nccl": True}),
        "devices",
        "NVIDIA H100 (80.0 GiB)",
    ),
    "NCCL": (spoiled(torch={"nccl": True}), "backends", "gloo, NCCL"),
    "the newest torch": (spoiled(torch={"version": "2.14.1a0+git1234"}), "torch", "2.14.1a0"),
    "torchrun": (
        spoiled(
            launched=Launched(
                rank=1, size=4, nodes=2, host="h", port=1, run="r/0", restart=0,
                interface="eth0",
            )
        ),
        "launcher",
        "worker 1 of 4, hosts: 2",
    ),
    "an interface": (spoiled(settings={"GLOO_SOCKET_IFNAME": "eth0"}), "network", "workers listen there"),
    "a debug level": (spoiled(settings={"ROUNDELAY_DEBUG": "2"}), "variables", "ROUNDELAY_DEBUG=2: shows"),
    "two cores of many": (spoiled(allowed_cores=4, core_quota=2.5), "cores", "2.5 cores' time"),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_merely_unusual_is_reported_as_ok(case: str) -> None:
    machine, name, words = RIGHT[case]
    assert {finding.name for finding in examine(machine) if finding.state != "ok"} == set()
    assert words in findings(machine)[name].found


def test_on_a_machine_where_all_is_well_every_check_says_so() -> None:
    assert [finding for finding in examine(WELL) if finding.state != "ok" or finding.remedy] == []
    names = [finding.name for finding in examine(WELL)]
    assert len(names) == len(set(names)) == 16


def test_every_check_can_fail() -> None:
    assert {name for _, name, _, _ in WRONG.values()} == set(findings(WELL))


def test_the_versions_are_those_of_the_project() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "torch")
    assert torch.specifier == SpecifierSet(">={}.{},<{}.{}".format(*TORCH[0], *TORCH[1]))
    assert Version("2.13.0") in torch.specifier


def test_every_variable_of_the_source_is_known_to_the_doctor() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert set(re.findall(r"ROUNDELAY_[A-Z_]*[A-Z]", text)) == set(env.VARIABLES)


def test_settings_are_the_variables_that_matter() -> None:
    given = {"ROUNDELAY_X": "1", "PATH": "/bin", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_TOP_PAD_": "2", "CXX": "c++"}
    assert env.settings(given) == {name: value for name, value in given.items() if name != "PATH"}


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 MiB"), (64 << 20, "64 MiB"), (GIB, "1.0 GiB")])
def test_bytes_are_printed_in_mib_or_gib(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
