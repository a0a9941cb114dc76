"""How many cores this process may compute on, and with how many intra-op threads plain PyTorch would do so here.

A container and a batch system give a process less than the machine has: an affinity mask names its processors, a
control group limits its time. Two processors of one core compute hardly more than one, so cores count.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from roundelay import env

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def allowed_processors() -> frozenset[int]:
    """The processors on which this process may run: its affinity mask, or all where the system has none."""
    with suppress(AttributeError, OSError):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Cores' worth of time that this process's control groups may use; None if there is no limit.

    Containers see all cores and all memory of their host. Both versions of the kernel's interface are read
    (Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/).
    """
    quotas = []
    for folder in groups("cpu", root, membership):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))  # "max" is no number: no limit
        with suppress(OSError, ValueError):
            micros = int((folder / "cpu.cfs_quota_us").read_text())
            length = (folder / "cpu.cfs_period_us").read_text()
            quotas += [micros / int(length)] if micros > 0 else []
    return min(quotas, default=None)


def groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in, and of all groups that contain them: the tightest limit counts.

    In a container the path that the kernel reports may not be mounted; the folders of it that exist are read.
    """
    lines: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        lines = membership.read_text().splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            base = root if number == "0" else root / controller
            group = base / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder == base or base in folder.parents)


@cache
def num_cores(processors: frozenset[int], topology: Path = _TOPOLOGY) -> int:
    """The number of cores that these processors belong to."""
    siblings = {_siblings(processor, topology) for processor in processors}
    return max(1, len(siblings))


def _siblings(processor: int, topology: Path) -> str:
    """What the kernel calls the core of a processor; the processor alone where it does not say."""
    with suppress(OSError):
        return (topology / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
    return str(processor)


def usable_cores() -> int:
    """Cores that this process may compute on: those of its affinity mask, as far as its quota goes; at least 1.

    ``ROUNDELAY_CORES`` declares another number, as if the machine had so many.
    """
    declared = env.cores()
    if declared is not None:
        return declared
    quota = core_quota()
    cores = num_cores(allowed_processors())
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def all_threads(default: Callable[[], int]) -> int:
    """Intra-op threads with which plain PyTorch computes in one process of this host.

    They are what the person has set (``OMP_NUM_THREADS``, ``torch.set_num_threads``), or one per usable core. A
    launcher's ``OMP_NUM_THREADS=1`` is not the person's word.

    Args:
        default: torch's own number for the calling thread.
    """
    given = env.omp_threads()
    if given is not None:  # torch has read it, and knows what the person has said since
        return given if env.is_launched() else max(1, default())
    if env.cores() is not None or env.is_launched():
        return usable_cores()
    return max(1, min(default(), usable_cores()))


def threads_each(workers: int, default: Callable[[], int]) -> int:
    """Intra-op threads of each of so many workers, of which those of this host share its cores.

    Args:
        workers: of the plan.
        default: torch's own number for the calling thread.
    """
    given, launched = env.omp_threads(), env.is_launched()
    if launched and given is not None:  # a launcher's processes have each what was set
        return given
    own = env.own_processors()
    if own is not None:
        return max(1, min(all_threads(default), own))
    here = env.processes_here() if launched else workers
    return max(1, all_threads(default) // max(1, here))
