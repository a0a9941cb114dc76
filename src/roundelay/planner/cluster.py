"""A declared cluster: the axes of a mesh with a link along each, or workers of several kinds and the links of nodes."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from roundelay.errors import PlanError
from roundelay.ir.num_bytes import parse_bytes
from roundelay.ir.plan import Plan
from roundelay.lower.validate_plan import SPEEDS

MOST = 4096
"""Workers of a cluster, at most."""


class _Declared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class ClusterLink(_Declared, frozen=True, kw_only=True):
    """A link between two workers.

    Args:
        latency_s: seconds of an empty message, or of a phase of an exchange.
        bytes_per_s: that a worker sends in one.
    """

    latency_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e6)]
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0.0, lt=1e18)]


class ClusterAxis(ClusterLink, frozen=True, kw_only=True):
    """One axis of a mesh: a link, and ``size``, the workers along it."""

    size: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]


class ClusterLinks(_Declared, frozen=True, kw_only=True):
    """The links ``within`` a node and ``between`` nodes."""

    within: ClusterLink
    between: ClusterLink


class _Rows(_Declared, frozen=True, kw_only=True):
    """Some workers that are alike."""

    speed: Annotated[float, msgspec.Meta(ge=SPEEDS[0], le=SPEEDS[1])] = 1.0
    memory: str | int | None = None
    node: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = 1


class _File(_Declared, frozen=True, kw_only=True):
    mesh: dict[str, ClusterAxis] | None = None
    flops_per_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e21)] = 0.0
    workers: tuple[_Rows, ...] | None = None
    links: ClusterLinks | None = None


@dataclass(frozen=True, slots=True)
class ClusterWorker:
    """One worker.

    Args:
        name: in a plan.
        number: its place in the file.
        speed: how many times as fast as this machine a process of it computes, with as many threads.
        memory: bytes that it may hold; None for any number.
        node: the name of the machine that it is on.
    """

    name: str
    number: int
    speed: float
    memory: int | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A mesh of workers of one kind, or any workers.

    Args:
        mesh: its axes, by name.
        flops_per_s: of each worker of a mesh; 0: operations take what they take here.
        workers: in the order of the file, where there is no mesh.
        links: of the nodes; None: messages take what they take here.
    """

    mesh: Mapping[str, ClusterAxis] = field(hash=False, default_factory=dict)
    flops_per_s: float = 0.0
    workers: tuple[ClusterWorker, ...] = ()
    links: ClusterLinks | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Workers along each axis."""
        return {name: axis.size for name, axis in self.mesh.items()}

    @property
    def most_on_a_node(self) -> int:
        """The most workers that are on one node."""
        return max(Counter([worker.node for worker in self.workers]).values())

    def worker(self, name: str) -> ClusterWorker:
        """The worker of this name."""
        return next(worker for worker in self.workers if worker.name == name)

    def limits(self, plan: Plan, each: int | None) -> list[int | None]:
        """Bytes that each worker of a plan may hold: of this cluster, and of any worker."""
        given = [(self.worker(worker.name).memory, each) for worker in plan.workers]
        return [min([limit for limit in pair if limit is not None], default=None) for pair in given]

    def as_in(self, plan: Plan) -> Cluster:
        """The workers of a plan alone, in the order of its stages."""
        names = dict.fromkeys([name for stage in plan.stages for name in stage.workers])
        return replace(self, workers=tuple([self.worker(name) for name in names]))

    @staticmethod
    def of(plan: Plan) -> Cluster | None:
        """The workers of a plan, in the order of its stages; None where all are alike."""
        if len({worker.speed for worker in plan.workers}) == 1 == plan.workers[0].speed:
            return None
        workers = [ClusterWorker(worker.name, number, worker.speed) for number, worker in enumerate(plan.workers)]
        return Cluster(workers=tuple(workers)).as_in(plan)

    @staticmethod
    def parse(text: str, where: str) -> Cluster:
        """The cluster that a TOML text declares.

        Args:
            text: ``[mesh]`` with a table for each axis, and ``flops_per_s``; or ``[[workers]]`` and ``[links]``.
            where: the file's name, for errors.

        Raises:
            PlanError: it declares none.
        """
        try:
            found = msgspec.convert(tomllib.loads(text), _File)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise _refused(where, str(error)) from error
        if (found.mesh is None) == (found.workers is None):
            raise _refused(where, "both" if found.mesh is not None else "neither of the two")
        if found.mesh is not None and (found.links is not None or not found.mesh):
            raise _refused(where, "[links] with [mesh]" if found.mesh else "no axis")
        if found.workers is not None and (found.flops_per_s or not found.workers):
            raise _refused(where, "flops_per_s with [[workers]]" if found.workers else "no worker")
        workers = tuple(_numbered(found.workers or (), where))
        return Cluster(found.mesh or {}, found.flops_per_s, workers, found.links)


def read_cluster(path: Path, wanted: Literal["mesh", "workers"]) -> Cluster:
    """Read a file that declares a cluster.

    Raises:
        PlanError: it cannot be read, or declares none, or another kind than is wanted.
    """
    try:
        cluster = Cluster.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(str(path), str(error)) from error
    if not getattr(cluster, wanted):
        raise PlanError(
            f"the cluster file {path}",
            got="[[workers]]" if wanted == "mesh" else "[mesh]",
            expected="[mesh], for --space all" if wanted == "mesh" else "[[workers]], for a plan that can be run",
            remedy="Name another file, or leave --space all out." if wanted == "mesh" else "Give --space all with it.",
        )
    return cluster


def _numbered(rows: Sequence[_Rows], where: str) -> Iterator[ClusterWorker]:
    """The workers of all rows, the first of which is worker 0."""
    every = [row for row in rows for _ in range(row.count)]
    if len(every) > MOST:
        raise _refused(where, f"{len(every)} workers, more than {MOST}")
    for number, row in enumerate(every):
        memory = None if row.memory is None else parse_bytes(row.memory, f"memory of a worker in {where}")
        yield ClusterWorker(f"w{number}", number, row.speed, memory, row.node)


def _refused(where: str, got: str) -> PlanError:
    return PlanError(
        f"the cluster file {where}",
        got=got,
        expected="[mesh] with axes such as data = { size = 2, latency_s = 5e-6, bytes_per_s = 2e10 }, and perhaps "
        'flops_per_s; or [[workers]] with speed = 0.5, and perhaps memory = "8GiB", node = "a" and count = 4, and '
        "perhaps [links] with within and between, each of which has latency_s and bytes_per_s",
        remedy="Correct it.",
    )
