"""Reads the machine. Whatever cannot be read is told as absent, and never ends the examination."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from roundelay.doctor.cgroup import cpu_quota, memory_limit
from roundelay.doctor.fork_probe import forked_backward_error
from roundelay.doctor.machine import Cores, Machine, Memory, Space, Torch
from roundelay.env import launched, settings
from roundelay.errors import UsageError
from roundelay.launchers import Launched

OPTIONAL = ("tensorboard", "transformers")
"""Packages that some part can use."""

_COMPILERS = ("g++", "clang++", "c++")
_DRIVER = Path("/proc/driver/nvidia/version")
_LOOPBACK_S = 1.0
_GONE = Space(path="the current folder", total=0, free=0, writable=False)
"""What a folder is to us that somebody has removed."""

Read = TypeVar("Read")


def probe(commands_error: str = "") -> Machine:
    """Read this machine; it takes some milliseconds once torch is loaded.

    Args:
        commands_error: why Roundelay's commands could not be loaded, if they could not.
    """
    launch, launch_error = _launch()
    torch = read_torch()
    now = settings()
    return Machine(
        python=sys.version_info[:3],
        commands_error=commands_error,
        torch=torch,
        packages={name: _version(name) for name in OPTIONAL},
        compiler=next(filter(None, map(shutil.which, filter(None, (now.get("CXX"), *_COMPILERS)))), None),
        glibc=_or(lambda: os.confstr("CS_GNU_LIBC_VERSION"), None),
        settings=now,
        launched=launch,
        launch_error=launch_error,
        interfaces=_or(lambda: tuple(name for _, name in socket.if_nameindex()), ()),
        cpu=_cpu(),
        cores=_cores(),
        memory=_memory(),
        driver=_DRIVER.exists(),
        fork=hasattr(os, "fork"),
        fork_error="" if torch.version is None else _forked(),
        loopback_error=_loopback(),
        shm=_or(lambda: _space(Path("/dev/shm")), None),
        folder=_or(lambda: _space(Path.cwd()), _GONE),
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
    )


def read_torch(name: str = "torch") -> Torch:
    """Torch, as far as it can be loaded and asked."""
    try:
        torch: Any = importlib.import_module(name)
        version = str(torch.__version__)
    except Exception as error:  # a broken library fails in any way it likes
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
        lowered_error=_lowered(torch),
    )


def _devices(torch: Any) -> tuple[tuple[tuple[str, int], ...], str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            return tuple((str(one.name), int(one.total_memory)) for one in found), "; ".join(
                str(w.message) for w in said
            )
        except Exception as error:
            return (), f"{type(error).__name__}: {error}"


def _lowered(torch: Any) -> str:
    """What an LSTM in bf16 says on this processor: not every one has a kernel for it, and torch does not ask before."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error).split('.')[0]}"


def _or(read: Callable[[], Read], absent: Read) -> Read:
    try:
        return read()
    except Exception:  # whatever a machine answers, the examination goes on
        return absent


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _launch() -> tuple[Launched | None, tuple[str, str] | None]:
    try:
        return launched(), None
    except UsageError as error:
        return None, (error.got, error.remedy)


def _lines(path: Path) -> list[str]:
    return _or(lambda: path.read_text().splitlines(), list[str]())


def _cpu() -> str:
    lines = _lines(Path("/proc/cpuinfo"))
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> Cores:
    total = os.cpu_count() or 1
    allowed = _or(lambda: len(os.sched_getaffinity(0)), total)
    return Cores(total=total, allowed=allowed, quota=_or(cpu_quota, None))


def _memory() -> Memory:
    lines = _lines(Path("/proc/meminfo"))
    found = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}
    return Memory(total=found.get("MemTotal"), available=found.get("MemAvailable"), limit=_or(memory_limit, None))


def _space(path: Path) -> Space:
    usage = shutil.disk_usage(path)
    return Space(path=str(path), total=usage.total, free=usage.free, writable=os.access(path, os.W_OK))


def _forked() -> str:
    """Why no gradient can be computed in a forked process; empty if one can."""
    try:
        return forked_backward_error()
    except OSError as error:  # no process, no pipe
        return str(error)


def _loopback() -> str:
    """Let a socket on loopback be found by another; the first word of why that fails."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        return str(error)
    return ""


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
