"""The machine as plain data: everything that the checks judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundelay.launchers import Launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """Torch as it is installed.

    Args:
        version: None if it cannot be imported.
        error: why not.
        distributed: whether this build has ``torch.distributed``.
        gloo: whether that has gloo.
        nccl: whether that has NCCL.
        cuda: version of CUDA that it was built for; None if for none.
        devices: name and bytes of memory of every CUDA device that it can use.
        device_error: why it can use none, where it says so.
        lowered_error: why the processor cannot compute an LSTM that autocast lowers to bf16, where it cannot.
    """

    version: str | None = None
    error: str = ""
    distributed: bool = False
    gloo: bool = False
    nccl: bool = False
    cuda: str | None = None
    devices: tuple[tuple[str, int], ...] = ()
    device_error: str = ""
    lowered_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Cores: of the machine, those this process may run on, and the share of time that its cgroup has (None: all)."""

    total: int
    allowed: int
    quota: float | None

    @property
    def usable(self) -> float:
        """How many this process can keep busy."""
        return float(self.allowed) if self.quota is None else min(float(self.allowed), self.quota)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the machine, bytes to be had now, and the cgroup's limit; None where the system does not tell."""

    total: int | None
    available: int | None
    limit: int | None

    @property
    def usable(self) -> int | None:
        """Bytes that a run can count on."""
        known = [one for one in (self.available, self.limit) if one is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Bytes of a file system, those that are free, and whether this process may write there."""

    path: str
    total: int
    free: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that was read.

    Args:
        python: version.
        commands_error: why Roundelay's commands cannot be loaded; empty if they can.
        torch: torch.
        packages: optional package to its version; None where it is missing.
        compiler: path of a C++ compiler.
        glibc: version of the C library, if it is glibc.
        settings: environment variables that matter and are set.
        launched: how a launcher started this process.
        launch_error: (got, remedy) where its variables cannot be used.
        interfaces: names of the network's interfaces.
        cpu: the processor's name.
        cores: its cores.
        memory: its memory.
        driver: whether an NVIDIA driver is there.
        fork: whether processes can be forked.
        fork_error: why a forked one could not compute a gradient when it was tried; empty if it could.
        loopback_error: why loopback cannot be used; empty if it can.
        shm: ``/dev/shm``.
        folder: the current folder.
        files: how many files a process may have open; None: any number.
        processes: how many processes and threads this person may have; None: any number.
    """

    python: tuple[int, int, int]
    commands_error: str
    torch: Torch
    packages: Mapping[str, str | None] = field(hash=False)
    compiler: str | None
    glibc: str | None
    settings: Mapping[str, str] = field(hash=False)
    launched: Launched | None
    launch_error: tuple[str, str] | None
    interfaces: tuple[str, ...]
    cpu: str
    cores: Cores
    memory: Memory
    driver: bool
    fork: bool
    fork_error: str
    loopback_error: str
    shm: Space | None
    folder: Space
    files: int | None
    processes: int | None
