"""Which launcher, if any, has started this process as one of several: torchrun, another that sets ``RANK``, Slurm, MPI.

Pure functions of an environment. A launcher gives each process its number and how many there are. torchrun also keeps a
store in which they meet; with any other launcher worker 0 opens one, at ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from roundelay.errors import UsageError

LEADER = 0
"""Number of the one of a launcher's processes that shows and writes what they do."""

Environment = Mapping[str, str]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process is one of several that a launcher started together.

    Args:
        rank: its number, and its worker's.
        local_rank: its number on its host.
        host_rank: number of its host; the leader's is 0.
        size: how many there are.
        nodes: on how many hosts.
        host: where the store listens in which they meet.
        port: at which port.
        run: name of the run and number of its restart: no two attempts meet.
        restart: number of the restart.
        interface: network interface to talk over (``GLOO_SOCKET_IFNAME``); None: loopback.
        launcher: its name, for people.
        opens_store: whether worker 0 opens the store, since the launcher keeps none.
    """

    rank: int
    local_rank: int
    host_rank: int
    size: int
    nodes: int
    host: str
    port: int
    run: str
    restart: int
    interface: str | None
    launcher: str = "torchrun"
    opens_store: bool = False

    @property
    def deputy(self) -> bool:
        """Whether it is the first on its host beside the leader."""
        return self.local_rank == int(self.host_rank == 0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """What a launcher calls things.

    Args:
        name: the launcher's, for people.
        rank: variable of the process's number.
        size: variable of how many there are.
        local_rank: variables, the first one set counts, of its number on its host.
        local_size: variables of how many there are on its host.
        node: variable of its host's number.
        nodes: variable of how many hosts there are.
        line: what to type where variables are missing.
    """

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    node: str = ""
    nodes: str = ""
    line: str = ""

    def started(self, now: Environment) -> bool:
        """Whether it has started this process as one of several."""
        return self.rank in now and _number(now.get(self.size, "")) > 1


_KNOWN = (
    _Launcher(
        name="a launcher that sets RANK and WORLD_SIZE",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        node="GROUP_RANK",
        nodes="GROUP_WORLD_SIZE",
        line="Have it set MASTER_ADDR and MASTER_PORT, too, or use `torchrun --nproc-per-node N -m roundelay train "
        "JOB.py`. If the variables are left over: `env -u RANK -u WORLD_SIZE roundelay ...`.",
    ),
    _Launcher(
        name="srun (Slurm)",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",  # of the step: SLURM_NTASKS is the job's, and set in its script, too
        local_rank=("SLURM_LOCALID",),
        node="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        line='Type `export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500` '
        "before srun; for one process, `srun --ntasks 1 roundelay ...`.",
    ),
    _Launcher(
        name="mpirun (Open MPI)",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        line="Type `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 -n N roundelay train JOB.py`, HOST being the first "
        "process's; for one process, leave mpirun out.",
    ),
    _Launcher(
        name="mpiexec (MPICH, Intel MPI)",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        line="Type `mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 -n N roundelay train JOB.py`, HOST being "
        "the first process's; for one process, leave mpiexec out.",
    ),
)


def is_torchrun(now: Environment) -> bool:
    """Whether torchrun, or another launcher of torch's elastic kind, has started this process."""
    return "TORCHELASTIC_RUN_ID" in now


def _launcher_of(now: Environment) -> _Launcher | None:
    """Another launcher than torchrun that has started this process as one of several."""
    return next((one for one in _KNOWN if one.started(now)), None)


def is_launched(now: Environment) -> bool:
    """Whether a launcher has started this process as one of several, or torchrun has at all."""
    return is_torchrun(now) or _launcher_of(now) is not None


def rank_of(now: Environment) -> str | None:
    """The number of this process, as its launcher writes it; None if it was started by hand."""
    if is_torchrun(now):
        return now.get("RANK", "?")
    launcher = _launcher_of(now)
    return None if launcher is None else now[launcher.rank]


def local_rank_of(now: Environment) -> str:
    """Its number on its host, as far as the launcher tells."""
    launcher = _KNOWN[0] if is_torchrun(now) else _launcher_of(now)
    return "0" if launcher is None else next((now[name] for name in launcher.local_rank if name in now), "0")


def launched(now: Environment) -> Launched | None:
    """How a launcher started this process; None if it was started by hand.

    Raises:
        UsageError: the launcher's variables are incomplete.
    """
    found = _by_torchrun(now) if is_torchrun(now) else _by_another(now)
    if found is not None and found.nodes > 1 and found.interface is None:
        raise UsageError(
            "the network between hosts",
            got="no interface to talk over: GLOO_SOCKET_IFNAME is not set",
            expected=f"one: nothing listens outside loopback unless it is told to; here are {', '.join(_interfaces())}",
            remedy=f"Type `export GLOO_SOCKET_IFNAME={_interfaces()[-1]}` on every host, with the interface that "
            "reaches the others.",
        )
    return found


def _by_torchrun(now: Environment) -> Launched:
    opens_store = now.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun --master-addr keeps none
    try:
        restart, nodes = int(now["TORCHELASTIC_RESTART_COUNT"]), int(now["GROUP_WORLD_SIZE"])
        return Launched(
            rank=int(now["RANK"]),
            local_rank=int(now["LOCAL_RANK"]),
            host_rank=int(now["GROUP_RANK"]),
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
        odd = "no " + " and no ".join(missing) if missing else f"MASTER_PORT={now['MASTER_PORT']}"
        raise UsageError(
            f"starting under {launcher.name}",
            got=f"{got}, but {odd}" if 0 <= number < size else f"{got}: {launcher.rank} and {launcher.size}",
            expected="a number for each process, and where worker 0 can be met by all: each would train alone",
            remedy=launcher.line,
        )
    nodes, host_rank, local_rank = _hosts(now, launcher, number, size)
    return Launched(
        rank=number,
        local_rank=local_rank,
        host_rank=host_rank,
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


def _hosts(now: Environment, launcher: _Launcher, number: int, size: int) -> tuple[int, int, int]:
    """Number of hosts, number of this one, and of this process on it, as far as the launcher tells.

    Where it tells nothing, all are on this host if they meet on loopback; else each is on a host of its own, as in
    Kubernetes.
    """
    local_size = next((_number(now[name]) for name in launcher.local_size if name in now), 0)
    if launcher.nodes in now and launcher.node in now:
        nodes, host_rank = _number(now[launcher.nodes]), _number(now[launcher.node])
    elif local_size > 0:
        nodes, host_rank = -(-size // local_size), number // local_size
    elif now["MASTER_ADDR"] in ("localhost", "::1") or now["MASTER_ADDR"].startswith("127."):
        nodes, host_rank = 1, 0
    else:
        nodes, host_rank = size, number
    known = next((_number(now[name]) for name in launcher.local_rank if name in now), -1)
    if known < 0:
        known = number if nodes == 1 else number % local_size if local_size else 0
    return max(1, nodes), max(0, host_rank), known


def _interfaces() -> list[str]:
    """The network interfaces of this host, loopback first."""
    names = [name for _, name in socket.if_nameindex()]
    return sorted(names, key=lambda name: name != "lo") or ["none"]


def _number(text: str) -> int:
    """The whole number that a text is; -1 if it is none."""
    return int(text) if text.isdecimal() else -1
