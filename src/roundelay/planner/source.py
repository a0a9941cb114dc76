"""What a planner asks about a job: of the job itself, where there is torch, or of facts that were collected there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from roundelay.cores import threads_each
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import Graph, Profile
from roundelay.ir.plan import Plan
from roundelay.planner.cluster import Cluster
from roundelay.planner.kept_bytes import SavedStorages
from roundelay.planner.mesh_signatures import MeshFacts

Kind = Literal["mean", "statistics", "other", "counts", "whole"]


@dataclass(frozen=True, slots=True)
class Divisibility:
    """Whether a batch may be cut.

    Args:
        kind: ``mean``: its loss is the mean of its parts'; ``statistics``: but for BatchNorm's statistics; ``other``:
            it is another; ``counts``: something counts forwards; ``whole``: it cannot be cut.
        why: the reason in words, for the last three.
        run: into how many parts the first batch is cut that is to be cut into so many.
    """

    kind: Kind
    why: str = ""
    run: int = 1


_Made = TypeVar("_Made")

MOST_MADE = 2048
"""Of so many results of a source the oldest are forgotten."""


class Memo(dict[Hashable, Any]):
    """What was made of a source, by all that it depends on beside it."""

    def of(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What was made under this key before, or is made now."""
        made: _Made = self[key] if key in self else self.setdefault(key, make())
        if len(self) > MOST_MADE:
            del self[next(iter(self))]
        return made


class Source(Protocol):
    """Answers about a job. An answer may take seconds the first time."""

    @property
    def memo(self) -> Memo:
        """What was made of it."""

    @property
    def graph(self) -> Graph:
        """Of the model, in full precision or in that of :meth:`lowered`."""

    @property
    def state_bytes(self) -> Mapping[str, int] | None:
        """Of each parameter's optimizer state, by name; None where the optimizer does not tell."""

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """Paths of modules that the model's code checkpoints itself."""

    def divisibility(self, draft: Plan, parts: int) -> Divisibility:
        """Whether the first batches may be cut into so many parts."""

    def lowered(self, draft: Plan) -> Source:
        """The same of the model in a plan's precision."""

    def profile(self, draft: Plan) -> tuple[Profile, str]:
        """Seconds of every operation on a micro-batch of the plan, and in words where they come from."""

    def storages(self, draft: Plan) -> SavedStorages:
        """What the operations keep of a micro-batch of the plan."""

    def mesh_facts(self) -> MeshFacts:
        """What signatures are deduced from."""

    def written_out(self, names: Sequence[str]) -> MeshFacts:
        """The same of the model in which these softmaxes are written out."""

    def whole_states(self, dims: Mapping[str, int]) -> Mapping[str, str]:
        """Parameters whose optimizer state must be whole, with the reason.

        Args:
            dims: the dimensions in which the states of parameters would be split, by name.
        """


@dataclass(frozen=True, slots=True)
class Hardware:
    """What planning must know of a host.

    Args:
        cores: on which it may compute.
        threads: of plain PyTorch in one process.
        devices: CUDA devices.
        cluster: the workers, where they are declared; each node has as many cores as this host.
    """

    cores: int
    threads: int
    devices: int = 0
    cluster: Cluster | None = None

    def threads_each(self, devices: Sequence[str]) -> int:
        """Intra-op threads of each worker on the CPU, of workers on these devices."""
        count = list(devices).count(CPU)
        return threads_each(min(count, self.cluster.most_on_a_node) if self.cluster else count, lambda: self.threads)
