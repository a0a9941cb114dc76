"""A declared cluster: the axes of a mesh with a link along each, or workers of several kinds and the links of nodes."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from roundelay.errors import PlanError
from roundelay.ir.num_bytes import parse_bytes
from roundelay.ir.plan import Plan


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class ClusterLink(_Table, frozen=True, kw_only=True):
    """A link: seconds of an empty message or of a phase of an exchange, and bytes per second that a worker sends."""

    latency_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e6)]
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0.0, lt=1e18)]


class ClusterAxis(ClusterLink, frozen=True, kw_only=True):
    """One axis of a mesh: the link, and how many workers there are along it."""

    size: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]


class ClusterLinks(_Table, frozen=True, kw_only=True):
    """The links of the workers within a node, and between nodes."""

    within: ClusterLink
    between: ClusterLink


class _Workers(_Table, frozen=True, kw_only=True):
    """Some workers that are alike."""

    speed: Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)] = 1.0
    memory: str | int | None = None
    node: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1


class _File(_Table, frozen=True, kw_only=True):
    mesh: dict[str, ClusterAxis] = {}
    flops_per_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e21)] = 0.0
    workers: tuple[_Workers, ...] = ()
    links: ClusterLinks | None = None


@dataclass(frozen=True, slots=True)
class ClusterWorker:
    """One worker.

    Args:
        name: in a plan.
        number: its place in the file.
        speed: how many times as fast as a process of this machine it computes: with as many threads, or each with its
            own.
        memory: bytes that it may hold.
        node: the name of the machine that it is on.
        threads: its intra-op ones; None: those of all workers.
    """

    name: str
    number: int
    speed: float
    memory: float = math.inf
    node: str = ""
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A mesh of workers of one kind, or any workers.

    Args:
        mesh: its axes, by name.
        flops_per_s: of each worker of a mesh; 0: operations take what they take here.
        workers: where there is no mesh.
        links: of the nodes; None: messages take what they take here.
        ordered: whether the workers have the stages in their order; else the planner says which has which.
    """

    mesh: Mapping[str, ClusterAxis] = field(hash=False, default_factory=dict)
    flops_per_s: float = 0.0
    workers: tuple[ClusterWorker, ...] = ()
    links: ClusterLinks | None = None
    ordered: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Workers along each axis."""
        return {name: axis.size for name, axis in self.mesh.items()}

    @property
    def most_on_a_node(self) -> int:
        """The most workers that are on one node."""
        return max(Counter([worker.node for worker in self.workers]).values())

    def as_in(self, plan: Plan) -> Cluster:
        """The workers of a plan alone, in the order of its stages."""
        known = {worker.name: worker for worker in self.workers}
        names = dict.fromkeys([name for stage in plan.stages for name in stage.workers])
        return replace(self, workers=tuple([known[name] for name in names]))

    @staticmethod
    def of(plan: Plan) -> Cluster | None:
        """The workers of a plan, in the order of its stages; None where all are alike."""
        workers = [ClusterWorker(worker.name, number, worker.speed) for number, worker in enumerate(plan.workers)]
        return Cluster(workers=tuple(workers)).as_in(plan) if {own.speed for own in workers} != {1.0} else None

    @staticmethod
    def parse(text: str, where: str) -> Cluster:
        """The cluster that a TOML text of a file ``where`` declares; raises a PlanError where it declares none."""
        try:
            found = msgspec.convert(tomllib.loads(text), _File)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise _refused(where, str(error)) from error
        if bool(found.mesh) == bool(found.workers):
            raise _refused(where, "an axis and a worker" if found.mesh else "no axis and no worker")
        if found.links if found.mesh else found.flops_per_s:
            raise _refused(where, "links beside mesh" if found.mesh else "flops_per_s beside workers")
        if found.links and len({own.node for own in found.workers}) < 2:
            raise _refused(where, "links between nodes, and workers of one node alone")
        every = enumerate([own for own in found.workers for _ in range(own.count)])
        limits = {m: math.inf if m is None else parse_bytes(m, where) for m in [own.memory for own in found.workers]}
        workers = [ClusterWorker(f"w{k}", k, own.speed, limits[own.memory], own.node) for k, own in every]
        return Cluster(found.mesh, found.flops_per_s, tuple(workers), found.links)


def read_cluster(path: Path, wanted: Literal["mesh", "workers"]) -> Cluster:
    """Read a file; raises a PlanError where it cannot be read, or does not declare a cluster with what is wanted."""
    try:
        cluster = Cluster.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(str(path), str(error)) from error
    if not getattr(cluster, wanted):
        raise _refused(str(path), f"no {wanted}: a mesh is for --space all, [[workers]] are for plans that can be run")
    return cluster


def _refused(where: str, got: str) -> PlanError:
    return PlanError(
        f"the cluster file {where}",
        got=got,
        expected="[mesh] with axes such as data = { size = 2, latency_s = 5e-6, bytes_per_s = 2e10 }, and perhaps "
        'flops_per_s; or [[workers]] with speed = 0.5, and perhaps memory = "8GiB", node = "a", count = 4, and perhaps '
        "[links] with within and between, each of which has latency_s and bytes_per_s",
        remedy="Correct it.",
    )
