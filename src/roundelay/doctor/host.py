"""The machine as plain data, and the functions that read it. What cannot be read counts as absent."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import socket
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from roundelay import env
from roundelay.cores import CGROUPS, MEMBERSHIP, all_threads, allowed_processors, core_quota, groups, usable_cores
from roundelay.detect_launcher import Launched
from roundelay.doctor.fork_probe import forked_backward_error
from roundelay.errors import UsageError

_NO_LIMIT = 1 << 62
"""Version 1 of control groups writes a number near 2^63 where there is no limit."""

_COMPILERS = ("g++", "clang++", "c++")
_DRIVER = Path("/proc/driver/nvidia/version")
_LOOPBACK_S = 1.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The installed torch.

    Args:
        version: None if torch cannot be imported.
        error: why not.
        distributed: whether this build has ``torch.distributed``.
        gloo: whether it has gloo.
        nccl: whether it has NCCL.
        cuda: version of CUDA that it was built for; None if it was built without.
        devices: name and bytes of memory of every CUDA device that torch can use.
        device_error: torch's own message where it can use none.
        bf16_lstm_error: why the CPU cannot compute an LSTM that autocast casts to bf16; empty if it can.
    """

    version: str | None = None
    error: str = ""
    distributed: bool = False
    gloo: bool = False
    nccl: bool = False
    cuda: str | None = None
    devices: tuple[tuple[str, int], ...] = ()
    device_error: str = ""
    bf16_lstm_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A file system: its size and free space in bytes, and whether this process may write there."""

    path: str
    total: int
    free: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Everything that the checks judge.

    Args:
        commands_error: why Roundelay's commands cannot be imported; empty if they can.
        torch: the installed torch.
        compiler: path of a C++ compiler.
        settings: environment variables that matter and are set.
        launched: how a launcher started this process; None if none did.
        refused: ``launcher`` or ``variables``, to (got, remedy) of environment variables that a run would refuse.
        interfaces: names of the network interfaces.
        cores: of the machine.
        allowed_cores: processors that this process may run on.
        core_quota: cores' worth of time that its control group may use; None: all.
        usable_cores: cores that workers compute on; two processors of one core count once.
        threads: intra-op threads with which plain PyTorch would compute here.
        memory: bytes of the machine.
        free_memory: bytes that are available now.
        memory_limit: bytes that its control group may use; None: all.
        driver: whether an NVIDIA driver is loaded.
        fork_error: why a forked process could not compute a gradient; empty if it could.
        loopback_error: why loopback cannot be used; empty if it can.
        shm: ``/dev/shm``; None if there is none.
        folder: the current folder; None if it was removed.
        files: how many files a process may have open; None: any number.
        processes: how many processes and threads the user may have; None: any number.
    """

    commands_error: str
    torch: Torch
    compiler: str | None
    settings: Mapping[str, str] = field(hash=False)
    launched: Launched | None
    refused: Mapping[str, tuple[str, str]] = field(hash=False)
    interfaces: tuple[str, ...]
    cores: int
    allowed_cores: int
    core_quota: float | None
    usable_cores: int
    threads: int
    memory: int
    free_memory: int
    memory_limit: int | None
    driver: bool
    fork_error: str
    loopback_error: str
    shm: Space | None
    folder: Space | None
    files: int | None
    processes: int | None


def read_machine(commands_error: str = "") -> HostFacts:
    """Read this machine; it takes some milliseconds once torch is imported.

    Args:
        commands_error: why Roundelay's commands could not be imported, if they could not.
    """
    torch, settings, memory = read_torch(), env.settings(), psutil.virtual_memory()
    compilers = map(shutil.which, filter(None, (settings.get("CXX"), *_COMPILERS)))
    launched, refused = _environment()
    return HostFacts(
        commands_error=commands_error,
        torch=torch,
        compiler=next(filter(None, compilers), None),
        settings=settings,
        launched=launched,
        refused=refused,
        interfaces=_or(lambda: tuple(psutil.net_if_addrs()), ()),
        cores=psutil.cpu_count() or 1,
        allowed_cores=len(allowed_processors()),
        core_quota=core_quota(),
        usable_cores=_or(usable_cores, 1),
        threads=_or(lambda: all_threads(importlib.import_module("torch").get_num_threads), 1),
        memory=memory.total,
        free_memory=memory.available,
        memory_limit=memory_limit(),
        driver=_DRIVER.exists(),
        fork_error="" if torch.version is None else _error_of(forked_backward_error),
        loopback_error=_error_of(_use_loopback),
        shm=_or(lambda: _space(Path("/dev/shm")), None),
        folder=_or(lambda: _space(Path.cwd()), None),
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
    )


def read_torch(name: str = "torch") -> Torch:
    """Read the installed torch, as far as it can be imported and called."""
    try:
        torch: Any = importlib.import_module(name)
        version = str(torch.__version__)
    except Exception as error:  # a broken library can fail in any way
        return Torch(error=f"{type(error).__name__}: {error}")
    distributed = _or(lambda: bool(torch.distributed.is_available()), False)
    devices, device_error = _devices(torch)
    return Torch(
        version=version,
        distributed=distributed,
        gloo=distributed and _or(lambda: bool(torch.distributed.is_gloo_available()), False),
        nccl=distributed and _or(lambda: bool(torch.distributed.is_nccl_available()), False),
        cuda=_or(lambda: torch.version.cuda, None),
        devices=devices,
        device_error=device_error,
        bf16_lstm_error=_bf16_lstm_error(torch),
    )


def _devices(torch: Any) -> tuple[tuple[tuple[str, int], ...], str]:
    """CUDA devices, and torch's warnings or error about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            names = tuple((str(device.name), int(device.total_memory)) for device in devices)
            return names, "; ".join(str(warning.message) for warning in caught)
        except Exception as error:
            return (), f"{type(error).__name__}: {error}"


def _bf16_lstm_error(torch: Any) -> str:
    """Run an LSTM in bf16: oneDNN has no kernel for it on some CPUs, and torch has no query for that."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error).split('.')[0]}"


def _environment() -> tuple[Launched | None, dict[str, tuple[str, str]]]:
    """The launcher, and which of its variables and of Roundelay's own a run would refuse."""
    launched, refused = None, {}
    try:
        launched = env.launched()
    except UsageError as error:
        refused["launcher"] = error.got, error.remedy
    for check in (env.level, env.check_malloc, env.cores):
        try:
            check()
        except UsageError as error:
            refused["variables"] = f"{error.subject}: {error.got}", f"Set it to {error.expected}, or unset it."
    return launched, refused


def _or(read: Callable[[], Value], absent: Value) -> Value:
    try:
        return read()
    except Exception:  # reading goes on, whatever fails
        return absent


def _error_of(function: Callable[[], str | None]) -> str:
    try:
        return function() or ""
    except OSError as error:
        return str(error)


def _use_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()


def _space(path: Path) -> Space:
    usage = psutil.disk_usage(str(path))
    return Space(path=str(path), total=usage.total, free=usage.free, writable=os.access(path, os.W_OK))


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def memory_limit(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that this process's control groups may use; None if there is no limit."""
    limits = []
    for folder in groups("memory", root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)
