"""Checks of what the machine and its system give: each a pure function of the machine as it was read."""

from __future__ import annotations

from roundelay.doctor.finding import Check, Finding, size
from roundelay.doctor.machine import Machine

FEW_CORES = 2
"""A pipeline of two workers keeps two cores busy."""

LOW_MEMORY = 1 << 30
"""Bytes: torch itself takes some 300 MB, and every process of a run holds its stage beside it."""

SMALL_SHM = 256 << 20
"""Bytes: what a container is given by default (64 MiB) is too little for a loader's processes."""

LOW_DISK, NO_DISK = 1 << 30, 64 << 20
"""Bytes for checkpoints, traces and metrics: little, and too little for anything."""

FEW_FILES, FEW_PROCESSES = 256, 128
"""Every worker has connections to the others, and a handful of threads, which the system counts as processes."""


def cpu(machine: Machine) -> Finding:
    """The processor's name."""
    return Finding("CPU", machine.cpu or "unnamed")


def cores(machine: Machine) -> Finding:
    """Cores that this process can keep busy."""
    have = machine.cores
    limits = []
    if have.allowed < have.total:
        limits.append(f"this process may run on {have.allowed}")
    if have.quota is not None and have.quota < have.allowed:
        limits.append(f"its container has {have.quota:g} cores' time")
    found = f"{have.total}" + (", but " + " and ".join(limits) if limits else "")
    if have.usable >= FEW_CORES:
        return Finding("cores", found)
    lift = " Lift the limit (taskset, docker run --cpus)." if limits else ""
    return Finding("cores", found, "warning", "Two workers share a core, and are no faster than one process." + lift)


def memory(machine: Machine) -> Finding:
    """Memory that a run can count on."""
    have, usable = machine.memory, machine.memory.usable
    if usable is None:
        return Finding("memory", "this system does not tell")
    parts = [f"{size(one)} {word}" for one, word in ((have.total, "in all"), (have.available, "to be had")) if one]
    if have.limit is not None and (have.total is None or have.limit < have.total):
        parts.append(f"limit of the container {size(have.limit)}")
    found = ", ".join(parts)
    if usable >= LOW_MEMORY:
        return Finding("memory", found)
    return Finding("memory", found, "warning", "End other programs, or raise the limit (docker run --memory).")


def fork(machine: Machine) -> Finding:
    """Whether workers can be processes."""
    if machine.fork and not machine.fork_error:
        return Finding("processes", "can be forked, and compute gradients then")
    if machine.fork:
        found = f"a forked process cannot compute gradients: {machine.fork_error}"
        remedy = "Use `--transport memory` (threads of one process), or torchrun, whose processes are not forked."
        return Finding("processes", found, "problem", remedy)
    remedy = "Use `--transport memory`, or Linux (on Windows: WSL)."
    return Finding("processes", "this system cannot fork: `--transport gloo` would not work", "problem", remedy)


def loopback(machine: Machine) -> Finding:
    """Whether processes of this host find each other."""
    if not machine.loopback_error:
        return Finding("loopback", "127.0.0.1 can be listened on and reached")
    remedy = "Bring it up (`ip link set lo up`) or allow it; `--transport memory` works without."
    return Finding("loopback", machine.loopback_error, "problem", remedy)


def shm(machine: Machine) -> Finding:
    """Room for what a DataLoader's processes hand over; workers' own shared memory has no name and lies elsewhere."""
    name, have = "shared memory", machine.shm
    if have is None or not have.writable:
        found = "there is no /dev/shm" if have is None else "/dev/shm cannot be written"
        remedy = "Mount a tmpfs there; what a DataLoader's processes hand over lies in it."
        return Finding(name, found, "warning", remedy)
    found = f"/dev/shm has {size(have.total)}, {size(have.free)} free"
    if have.total < SMALL_SHM:
        remedy = "Make it larger: `docker run --shm-size=1g`, or `mount -o remount,size=1g /dev/shm`."
        return Finding(name, found, "warning", remedy)
    if have.free < SMALL_SHM:
        return Finding(name, found, "warning", "Remove what ended programs have left in /dev/shm.")
    return Finding(name, found)


def disk(machine: Machine) -> Finding:
    """Room for run folders."""
    have = machine.folder
    found = f"{size(have.free)} free for run folders in {have.path}"
    if not have.writable:
        return Finding("disk", f"{have.path} cannot be written", "problem", "Go to a folder of yours, or give --out.")
    if have.free < NO_DISK:
        return Finding("disk", found, "problem", "Free some space, or give --out on another disk.")
    if have.free < LOW_DISK:
        return Finding("disk", found, "warning", "Free some space: a checkpoint is kept until the next is whole.")
    return Finding("disk", found)


def limits(machine: Machine) -> Finding:
    """Open files, processes and threads."""
    found = ", ".join(
        f"{word} {'any number' if limit is None else limit}"
        for word, limit in (("open files", machine.files), ("processes and threads", machine.processes))
    )
    remedies = []
    if machine.files is not None and machine.files < FEW_FILES:
        remedies.append("`ulimit -n 4096`")
    if machine.processes is not None and machine.processes < FEW_PROCESSES:
        remedies.append("`ulimit -u 4096`")
    if remedies:
        return Finding("limits", found, "warning", f"Raise it for this shell: {' and '.join(remedies)}.")
    return Finding("limits", found)


HARDWARE: tuple[Check, ...] = (cpu, cores, memory, fork, loopback, shm, disk, limits)
"""The checks of the machine and its system, in the order in which they are told."""
