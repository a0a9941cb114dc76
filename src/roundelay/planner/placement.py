"""Which workers of a declared cluster hold which stages: groups of them, and the order that is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundelay.errors import PlanError
from roundelay.ir.plan import Plan, WorkerPlan
from roundelay.planner.cluster import Cluster, ClusterWorker
from roundelay.planner.partition_dp import Holders, Seats
from roundelay.schedules import PIPELINE

Owners = Sequence[Sequence[int]]
"""For each stage, the numbers of the workers that hold it."""

_Groups = list[tuple[ClusterWorker, ...]]


@dataclass(frozen=True, slots=True)
class Placement:
    """What may hold the stages of a draft.

    Args:
        groups: of workers, each for one place of the pipeline, the fastest first.
        kinds: for each group, the number of its kind.
        seats: the kinds.
    """

    groups: _Groups
    kinds: tuple[int, ...]
    seats: Seats

    def groups_in(self, order: Sequence[int], columns: Sequence[int]) -> _Groups:
        """The groups of stages that are held by these kinds, where that was chosen; else as the stages' places."""
        if self.seats.order:
            return [self.groups[column] for column in columns]
        left = list(range(len(self.groups)))
        found = []
        for kind in order:
            left.remove(one := next(i for i in left if self.kinds[i] == kind))
            found.append(self.groups[one])
        return found


def placement(cluster: Cluster, draft: Plan, owners: Owners) -> Placement | None:
    """The groups of workers among which the holders of a pipeline's stages are chosen; None in another layout.

    The holders of a stage wait for each other, so they are alike as far as can be: neighbours by speed. Where workers
    alternate several stages the fastest groups come first.

    Args:
        cluster: with its workers.
        draft: with its workers.
        owners: of its stages.

    Raises:
        PlanError: it has more workers than there are.
    """
    if draft.num_workers > len(cluster.workers):
        raise PlanError(
            "workers of the plan",
            got=str(draft.num_workers),
            expected=f"at most {len(cluster.workers)}, as the cluster file has",
            remedy="Give fewer --workers, or declare more.",
        )
    if draft.layout != PIPELINE:
        return None
    every = sorted(cluster.workers, key=lambda own: (-own.speed, -(own.memory or math.inf), own.node, own.number))
    groups = _grouped(every, draft)
    alike = [_alike(group, cluster) for group in groups]
    kinds = list(dict.fromkeys(alike))
    places = _columns(draft, owners)
    numbers = tuple([kinds.index(own) for own in alike])
    order = tuple([numbers[place] for place in places]) if len({*places}) < len(places) else ()
    links = cluster.links
    between = None if links is None else (links.between.latency_s, links.between.bytes_per_s)
    own = tuple([replace(kind, count=alike.count(kind)) for kind in kinds])
    return Placement(groups, numbers, Seats(own, order, between=between))


def placed(
    cluster: Cluster, draft: Plan, owners: Owners, found: Placement | None, order: Sequence[int]
) -> tuple[tuple[WorkerPlan, ...], list[list[str]]]:
    """The workers of a plan, in the order of the cluster; and for each stage the names of its holders.

    Args:
        cluster: with its workers.
        draft: with its workers.
        owners: of its stages.
        found: the groups among which they were chosen.
        order: for each stage the kind of its holders; empty where the workers stand as they are given.
    """
    places = _columns(draft, owners)
    seat = dict(enumerate(cluster.workers))
    if found is not None:
        given = _grouped(cluster.workers, draft)
        groups = found.groups_in(order, places) if order else [given[place] for place in places]
        seat = {n: one for own, group in zip(owners, groups, strict=True) for n, one in zip(own, group, strict=True)}
    used = sorted({seat[n] for own in owners for n in own}, key=lambda one: one.number)
    workers = [replace(w, name=own.name, speed=own.speed) for w, own in zip(draft.workers, used, strict=True)]
    return tuple(workers), [[seat[n].name for n in own] for own in owners]


def _columns(draft: Plan, owners: Owners) -> list[int]:
    """For each stage its place in the pipeline."""
    return [own[0] // draft.mesh_size for own in owners]


def _grouped(workers: Sequence[ClusterWorker], draft: Plan) -> _Groups:
    size = draft.replicas * draft.mesh_size
    return [tuple(workers[i : i + size]) for i in range(0, len(workers) - size + 1, size)]


def _alike(group: Sequence[ClusterWorker], cluster: Cluster) -> Holders:
    memory = min([math.inf if own.memory is None else own.memory for own in group])
    nodes = () if cluster.links is None else tuple([own.node for own in group])
    return Holders(1, min(own.speed for own in group), memory, nodes)
