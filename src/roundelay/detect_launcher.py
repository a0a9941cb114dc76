"""Detects the launcher that started this process as one of several: torchrun, another that sets ``RANK``, Slurm, MPI.

All functions are pure functions of an environment. A launcher sets each process's rank and their number. torchrun also
hosts the store of the rendezvous; with any other launcher worker 0 does, at ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from roundelay.errors import UsageError

LEADER = 0
"""Rank of the process that prints and writes results."""

Environment = Mapping[str, str]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How a launcher started this process as one of several.

    Args:
        rank: of this process, and the number of its worker.
        size: number of processes.
        nodes: number of hosts.
        host: address at which the rendezvous store listens.
        port: its port.
        run: name of the run and number of its restart, so that processes of two attempts do not meet.
        restart: number of the restart.
        interface: network interface for connections (``GLOO_SOCKET_IFNAME``); None: loopback.
        launcher: its name, for messages.
        opens_store: whether worker 0 opens the store, because the launcher hosts none.
    """

    rank: int
    size: int
    nodes: int
    host: str
    port: int
    run: str
    restart: int
    interface: str | None
    launcher: str = "torchrun"
    opens_store: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """The environment variables of a launcher.

    Args:
        name: of the launcher, for messages.
        rank: variable of the process's rank.
        size: variable of the number of processes.
        local_size: variables of the number of processes on this host.
        nodes: variable of the number of hosts.
        processors: variable of the number of processors that each process has for itself.
        line: remedy where variables are missing.
    """

    name: str
    rank: str
    size: str
    local_size: tuple[str, ...] = ()
    nodes: str = ""
    processors: str = ""
    line: str = ""

    def started(self, now: Environment) -> bool:
        """Whether it has started this process as one of several."""
        return self.rank in now and _number(now.get(self.size, "")) > 1


_KNOWN = (
    _Launcher(
        name="a launcher that sets RANK and WORLD_SIZE",
        rank="RANK",
        size="WORLD_SIZE",
        local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        nodes="GROUP_WORLD_SIZE",
        line="Have it set MASTER_ADDR and MASTER_PORT, too, or use `torchrun --nproc-per-node N -m roundelay train "
        "JOB.py`. If the variables are left over: `env -u RANK -u WORLD_SIZE roundelay ...`.",
    ),
    _Launcher(
        name="srun (Slurm)",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",  # of the step: SLURM_NTASKS is also set in the batch script
        nodes="SLURM_STEP_NUM_NODES",
        processors="SLURM_CPUS_PER_TASK",  # set where --cpus-per-task is given
        line='Type `export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500` '
        "before srun; for one process, `srun --ntasks 1 roundelay ...`.",
    ),
    _Launcher(
        name="mpirun (Open MPI)",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        line="Type `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 -n N roundelay train JOB.py`, HOST being the first "
        "process's; for one process, leave mpirun out.",
    ),
    _Launcher(
        name="mpiexec (MPICH, Intel MPI)",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_size=("MPI_LOCALNRANKS",),
        line="Type `mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 -n N roundelay train JOB.py`, HOST being "
        "the first process's; for one process, leave mpiexec out.",
    ),
)


def is_torchrun(now: Environment) -> bool:
    """Whether torchrun, or another launcher of torch's elastic kind, has started this process."""
    return "TORCHELASTIC_RUN_ID" in now


def _launcher_of(now: Environment) -> _Launcher | None:
    """The launcher other than torchrun that started this process as one of several, if any."""
    return next((one for one in _KNOWN if one.started(now)), None)


def is_launched(now: Environment) -> bool:
    """Whether a launcher started this process as one of several, or torchrun started it, even alone."""
    return is_torchrun(now) or _launcher_of(now) is not None


def processes_here(now: Environment) -> int:
    """How many of the launcher's processes share this host, as far as it says; 1 if none started this process."""
    launcher = _launcher_of(now)
    if launcher is None:
        return 1
    size = _number(now.get(launcher.size, ""))
    given = next((_number(now[name]) for name in launcher.local_size if name in now), 0)
    return max(1, given if given > 0 else -(-size // _num_hosts({"MASTER_ADDR": "127.0.0.1", **now}, launcher, size)))


def own_processors(now: Environment) -> int | None:
    """How many processors the launcher has given this process for itself; None if it does not say."""
    launcher = None if is_torchrun(now) else _launcher_of(now)
    count = 0 if launcher is None else _number(now.get(launcher.processors, ""))
    return count if count > 0 else None


def rank_of(now: Environment) -> str | None:
    """The rank of this process, as its launcher writes it; None if it was started by hand."""
    if is_torchrun(now):
        return now.get("RANK", "?")
    launcher = _launcher_of(now)
    return None if launcher is None else now[launcher.rank]


def launched(now: Environment) -> Launched | None:
    """Return how a launcher started this process; None if it was started by hand.

    Raises:
        UsageError: the launcher's variables are incomplete.
    """
    place = _by_torchrun(now) if is_torchrun(now) else _by_another(now)
    if place is not None and place.nodes > 1 and place.interface is None:
        raise UsageError(
            "the network between hosts",
            got="GLOO_SOCKET_IFNAME is not set",
            expected=f"the interface to listen on, one of {', '.join(_interfaces())}; the default is loopback alone",
            remedy=f"Type `export GLOO_SOCKET_IFNAME={_interfaces()[-1]}` on every host, with the interface that "
            "reaches the others.",
        )
    return place


def _by_torchrun(now: Environment) -> Launched:
    opens_store = now.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun --master-addr hosts none
    try:
        restart, nodes = int(now["TORCHELASTIC_RESTART_COUNT"]), int(now["GROUP_WORLD_SIZE"])
        return Launched(
            rank=int(now["RANK"]),
            size=int(now["WORLD_SIZE"]),
            nodes=nodes,
            host=_LOOPBACK if opens_store and nodes == 1 else now["MASTER_ADDR"],
            port=int(now["MASTER_PORT"]),
            run=f"{now['TORCHELASTIC_RUN_ID']}/{restart}",
            restart=restart,
            interface=now.get("GLOO_SOCKET_IFNAME"),
            opens_store=opens_store,
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            "starting under a launcher",
            got=f"its variables without a usable {error}",
            expected="those that torchrun sets",
            remedy="Use `torchrun --rdzv-backend c10d --rdzv-endpoint HOST:PORT ... -m roundelay train JOB.py`.",
        ) from error


def _by_another(now: Environment) -> Launched | None:
    launcher = _launcher_of(now)
    if launcher is None:
        return None
    size, number = _number(now[launcher.size]), _number(now[launcher.rank])
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not now.get(name)]
    if missing or not 0 <= number < size or _number(now["MASTER_PORT"]) <= 0:
        got = f"process {now[launcher.rank]} of {size}"
        problem = "no " + " and no ".join(missing) if missing else f"MASTER_PORT={now['MASTER_PORT']}"
        raise UsageError(
            f"starting under {launcher.name}",
            got=f"{got}, but {problem}" if 0 <= number < size else f"{got}: {launcher.rank} and {launcher.size}",
            expected="a rank for each process, and the address of worker 0; without them each would train alone",
            remedy=launcher.line,
        )
    nodes = _num_hosts(now, launcher, size)
    return Launched(
        rank=number,
        size=size,
        nodes=nodes,
        host=_LOOPBACK if nodes == 1 else now["MASTER_ADDR"],
        port=_number(now["MASTER_PORT"]),
        run="0",
        restart=0,
        interface=now.get("GLOO_SOCKET_IFNAME"),
        launcher=launcher.name,
        opens_store=True,
    )


def _num_hosts(now: Environment, launcher: _Launcher, size: int) -> int:
    """Return the number of hosts.

    Where the launcher sets no variable for it, all are on this host if MASTER_ADDR is loopback; otherwise each
    is on a host of its own, as in Kubernetes.
    """
    if launcher.nodes in now:
        return max(1, _number(now[launcher.nodes]))
    local_size = next((_number(now[name]) for name in launcher.local_size if name in now), 0)
    if local_size > 0:
        return -(-size // local_size)
    return 1 if now["MASTER_ADDR"] in ("localhost", "::1") or now["MASTER_ADDR"].startswith("127.") else size


def _interfaces() -> list[str]:
    """Names of the network interfaces of this host, loopback first."""
    names = [name for _, name in socket.if_nameindex()]
    return sorted(names, key=lambda name: name != "lo") or ["none"]


def _number(text: str) -> int:
    """Parse a non-negative integer; -1 if the text is none."""
    return int(text) if text.isdecimal() else -1
