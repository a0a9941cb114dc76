"""The checks of ``roundelay doctor``, each a pure function of the machine; only what makes a run fail is checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from roundelay.doctor.host import HostFacts
from roundelay.env import VARIABLES
from roundelay.errors import counted

State = Literal["ok", "warning", "problem"]

TORCH = ((2, 11), (2, 15))
"""The oldest torch that works, and the first that may not; as in ``pyproject.toml``."""

FEW_CORES = 2
"""A pipeline of two workers keeps two cores busy."""

LOW_MEMORY = 1 << 30
"""Bytes: torch itself takes about 300 MB in every process of a run, and each holds its stage in addition."""

SMALL_SHM = 256 << 20
"""Bytes: the 64 MiB that Docker gives a container are too few for a DataLoader's processes."""

LOW_DISK, NO_DISK = 1 << 30, 64 << 20
"""Bytes for checkpoints, traces and metrics: little, and too little for anything."""

FEW_FILES, FEW_PROCESSES = 256, 128
"""Every worker has connections to the others, and a few threads, which the system counts as processes."""

_INSTALL = 'Run: pip install "torch>={}.{},<{}.{}"'.format(*TORCH[0], *TORCH[1])


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        name: of the check.
        found: what was found.
        state: ``problem``: something that Roundelay offers everywhere fails; ``warning``: a part of it fails or is
            slow; ``ok``: neither.
        remedy: what to do about it; empty if the state is ``ok``.
    """

    name: str
    found: str
    state: State = "ok"
    remedy: str = ""


def examine(machine: HostFacts) -> tuple[Finding, ...]:
    """Every check's finding, in the order in which they are printed."""
    installed = (torch, commands, devices, bf16, backends, compiler, launcher, network, variables)
    system = (cores, memory, fork, loopback, shm, disk, limits)
    return tuple(check(machine) for check in (*installed, *system))


def torch(machine: HostFacts) -> Finding:
    """Whether torch can be imported, in a version that works."""
    version = machine.torch.version
    if version is None:
        return Finding("torch", f"cannot be imported: {machine.torch.error}", "problem", _INSTALL)
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts and TORCH[0] <= (int(parts[1]), int(parts[2])) < TORCH[1]:
        return Finding("torch", version)
    return Finding("torch", f"{version}, which Roundelay does not support", "problem", _INSTALL)


def commands(machine: HostFacts) -> Finding:
    """Whether Roundelay's own commands can be imported."""
    if not machine.commands_error:
        return Finding("roundelay", "its commands can be imported")
    remedy = "Install the missing packages: `python -m pip check` lists what is missing or does not fit."
    return Finding("roundelay", f"its commands cannot be imported: {machine.commands_error}", "problem", remedy)


def devices(machine: HostFacts) -> Finding:
    """Whether torch can use the GPUs for which there is a driver."""
    build = machine.torch
    if build.version is None:
        return _unknown("devices")
    if build.devices:
        return Finding("devices", ", ".join(f"{name} ({size(memory)})" for name, memory in build.devices))
    if not machine.driver:
        return Finding("devices", "no CUDA device: the CPU computes")
    built = "is built without CUDA" if build.cuda is None else f"is built for CUDA {build.cuda}"
    reason = f": {build.device_error}" if build.device_error else ""
    remedy = "Install the build of torch that fits the driver: https://pytorch.org/get-started/locally/"
    return Finding("devices", f"an NVIDIA driver, but torch {built} and sees no device{reason}", "warning", remedy)


def bf16(machine: HostFacts) -> Finding:
    """Whether the CPU computes every layer in bf16: for an LSTM oneDNN has no kernel on some CPUs."""
    if machine.torch.version is None:
        return _unknown("bf16")
    error = machine.torch.bf16_lstm_error
    if not error:
        return Finding("bf16", "computed by the CPU, LSTMs included")
    remedy = "For a model with an LSTM leave `--precision` out, or cast its input by hand."
    return Finding("bf16", f"no kernel for an LSTM of fp32 values: {error}", "warning", remedy)


def backends(machine: HostFacts) -> Finding:
    """Whether torch has the communication backends."""
    build = machine.torch
    if build.version is None:
        return _unknown("backends")
    if not build.gloo:
        found = (
            "torch.distributed without gloo" if build.distributed else "this build of torch has no torch.distributed"
        )
        remedy = "Install torch from PyPI or pytorch.org; `--transport gloo` and torchrun need gloo."
        return Finding("backends", found, "problem", remedy)
    if build.devices and not build.nccl:
        remedy = "Install a build of torch with NCCL, or let the devices' workers communicate over gloo."
        return Finding("backends", "gloo, but no NCCL between the CUDA devices", "warning", remedy)
    return Finding("backends", "gloo, NCCL" if build.nccl else "gloo; no NCCL, which only CUDA devices need")


def _unknown(name: str) -> Finding:
    return Finding(name, "not known without torch", "warning", "See torch.")


def compiler(machine: HostFacts) -> Finding:
    """Whether there is a C++ compiler, which torch.compile calls."""
    if machine.compiler is not None:
        return Finding("C++ compiler", machine.compiler)
    return Finding("C++ compiler", "none: `--compile` would fail", "warning", "Install g++ or clang++.")


def launcher(machine: HostFacts) -> Finding:
    """Whether the variables that a launcher has set are complete."""
    if "launcher" in machine.refused:
        got, remedy = machine.refused["launcher"]
        return Finding("launcher", got, "problem", remedy)
    if machine.launched is None:
        return Finding("launcher", "none: started by hand")
    process = machine.launched
    return Finding("launcher", f"{process.launcher}: worker {process.rank} of {process.size}, hosts: {process.nodes}")


def network(machine: HostFacts) -> Finding:
    """Whether the network interface for several hosts exists."""
    interface = machine.settings.get("GLOO_SOCKET_IFNAME")
    if interface is None:
        return Finding("network", "GLOO_SOCKET_IFNAME is not set: nothing listens outside loopback")
    if interface in machine.interfaces:
        return Finding("network", f"GLOO_SOCKET_IFNAME={interface}: under torchrun, workers listen there")
    known = ", ".join(machine.interfaces) or "none"
    remedy = "Set it to one of these, or unset it if all workers are on this host."
    found = f"GLOO_SOCKET_IFNAME={interface}, but the interfaces are: {known}"
    return Finding("network", found, "problem", remedy)


def variables(machine: HostFacts) -> Finding:
    """Whether Roundelay's own environment variables are known and valid."""
    if "variables" in machine.refused:
        got, remedy = machine.refused["variables"]
        return Finding("variables", got, "problem", remedy)
    ours = {key: value for key, value in machine.settings.items() if key.startswith("ROUNDELAY_")}
    found = "; ".join(f"{key}={value}: {VARIABLES.get(key, 'unknown, without effect')}" for key, value in ours.items())
    if unknown := [key for key in ours if key not in VARIABLES]:
        return Finding("variables", found, "warning", f"Unset {', '.join(unknown)}; known: {', '.join(VARIABLES)}.")
    return Finding("variables", found or "none of Roundelay's is set")


def cores(machine: HostFacts) -> Finding:
    """Whether two workers can compute at the same time."""
    limits = []
    usable = float(machine.allowed_cores)
    if machine.allowed_cores < machine.cores:
        limits.append(f"this process may run on {machine.allowed_cores}")
    if machine.core_quota is not None and machine.core_quota < usable:
        usable = machine.core_quota
        limits.append(f"its container has {usable:g} cores' time")
    found = f"{machine.cores}" + (", but " + " and ".join(limits) if limits else "")
    found += f"; workers share {counted(machine.threads, 'thread')} on {counted(machine.usable_cores, 'core')}"
    if usable >= FEW_CORES:
        return Finding("cores", found)
    lift = " Lift the limit (taskset, docker run --cpus)." if limits else ""
    return Finding("cores", found, "warning", "Two workers share a core, and are no faster than one process." + lift)


def memory(machine: HostFacts) -> Finding:
    """Whether there is memory for a few processes with torch."""
    limit = machine.memory_limit
    found = f"{size(machine.memory)} in all, {size(machine.free_memory)} available"
    if limit is not None and limit < machine.memory:
        found += f", limit of the container {size(limit)}"
    if min(machine.free_memory, machine.free_memory if limit is None else limit) >= LOW_MEMORY:
        return Finding("memory", found)
    return Finding("memory", found, "warning", "End other programs, or raise the limit (docker run --memory).")


def fork(machine: HostFacts) -> Finding:
    """Whether workers can be processes."""
    if not machine.fork_error:
        return Finding("processes", "can be forked, and compute gradients then")
    found = f"a forked process cannot compute gradients: {machine.fork_error}"
    remedy = "Use `--transport memory` (threads of one process), or torchrun, whose processes are not forked."
    return Finding("processes", found, "problem", remedy)


def loopback(machine: HostFacts) -> Finding:
    """Whether processes of this host can connect to each other."""
    if not machine.loopback_error:
        return Finding("loopback", "127.0.0.1 can be listened on and reached")
    remedy = "Bring it up (`ip link set lo up`) or allow it; `--transport memory` works without."
    return Finding("loopback", machine.loopback_error, "problem", remedy)


def shm(machine: HostFacts) -> Finding:
    """Whether a DataLoader's processes can return batches; Roundelay's own shared memory is not in ``/dev/shm``."""
    name, space = "shared memory", machine.shm
    if space is None or not space.writable:
        found = "there is no /dev/shm" if space is None else "/dev/shm cannot be written"
        return Finding(name, found, "warning", "Mount a tmpfs there: a DataLoader's processes return batches in it.")
    found = f"/dev/shm has {size(space.total)}, {size(space.free)} free"
    if space.total < SMALL_SHM:
        remedy = "Make it larger: `docker run --shm-size=1g`, or `mount -o remount,size=1g /dev/shm`."
        return Finding(name, found, "warning", remedy)
    if space.free < SMALL_SHM:
        return Finding(name, found, "warning", "Remove what ended programs have left in /dev/shm.")
    return Finding(name, found)


def disk(machine: HostFacts) -> Finding:
    """Whether run folders can be written in the current folder."""
    space = machine.folder
    if space is None or not space.writable:
        path = "the current folder" if space is None else space.path
        remedy = "Go to a folder that you may write to, or give --out."
        return Finding("disk", f"{path} cannot be written", "problem", remedy)
    found = f"{size(space.free)} free for run folders in {space.path}"
    if space.free < NO_DISK:
        return Finding("disk", found, "problem", "Free some space, or give --out on another disk.")
    if space.free < LOW_DISK:
        return Finding("disk", found, "warning", "Free some space: a checkpoint is kept until the next is complete.")
    return Finding("disk", found)


def limits(machine: HostFacts) -> Finding:
    """Whether enough files, processes and threads are allowed."""
    files, processes = machine.files, machine.processes
    found = f"open files {files or 'any number'}, processes and threads {processes or 'any number'}"
    remedies = []
    if files is not None and files < FEW_FILES:
        remedies.append("`ulimit -n 4096`")
    if processes is not None and processes < FEW_PROCESSES:
        remedies.append("`ulimit -u 4096`")
    if remedies:
        return Finding("limits", found, "warning", f"Raise it for this shell: {' and '.join(remedies)}.")
    return Finding("limits", found)


def size(num_bytes: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
