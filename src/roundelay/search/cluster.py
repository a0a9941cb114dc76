"""A declared cluster: the axes of a mesh, and the links between workers along each. No torch is needed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from roundelay.errors import PlanError

Above = Annotated[float, msgspec.Meta(gt=0.0, lt=1e18)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAxis:
    """One axis.

    Args:
        size: workers along it.
        latency_s: seconds of a phase of an exchange along it.
        bytes_per_s: that a worker sends in one.
    """

    size: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]
    latency_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e6)]
    bytes_per_s: Above


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All workers of one kind, on a mesh.

    Args:
        mesh: its axes, by name.
        flops_per_s: of each worker; 0: operations take what they take here.
    """

    mesh: Mapping[str, ClusterAxis] = field(hash=False)
    flops_per_s: Annotated[float, msgspec.Meta(ge=0.0, lt=1e21)] = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """Workers along each axis."""
        return {name: axis.size for name, axis in self.mesh.items()}

    @staticmethod
    def parse(text: str, where: str) -> Cluster:
        """The cluster that a TOML text declares.

        Args:
            text: ``[mesh]`` with a table for each axis, and ``flops_per_s``.
            where: the file's name, for errors.

        Raises:
            PlanError: it declares none.
        """
        try:
            table = tomllib.loads(text)
            if unknown := table.keys() - {"mesh", "flops_per_s"}:
                raise _refused(where, f"the field {min(unknown)!r}")
            found = msgspec.convert(table, Cluster)
        except msgspec.ValidationError as error:
            raise _refused(where, str(error)) from error
        except (ValueError, RecursionError) as error:
            raise _refused(where, str(error)) from error
        if not found.mesh:
            raise _refused(where, "no axis")
        return found


def _refused(where: str, got: str) -> PlanError:
    return PlanError(
        f"the cluster file {where}",
        got=got,
        expected="[mesh] with axes such as data = { size = 2, latency_s = 5e-6, bytes_per_s = 2e10 }, and perhaps "
        "flops_per_s",
        remedy="Correct it.",
    )
