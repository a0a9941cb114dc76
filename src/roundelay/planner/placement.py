"""Which workers of a declared cluster hold which stages: groups of them, one for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundelay.errors import PlanError
from roundelay.ir.num_bytes import parse_bytes
from roundelay.ir.plan import Plan, WorkerPlan
from roundelay.planner.cluster import Cluster, ClusterWorker
from roundelay.planner.partition_dp import Holders, Seats
from roundelay.schedules import PIPELINE

Owners = Sequence[Sequence[int]]
"""For each stage, the numbers of the workers that hold it."""


def limited_cluster(cluster: Cluster | None, draft: Plan, limit: str | int | None) -> Cluster | None:
    """The workers with what they may hold at most; None where nothing is limited, and all are alike."""
    if limit is None:
        return cluster
    most = parse_bytes(limit, "--memory-limit")
    alike = tuple([ClusterWorker(own.name, number, 1.0) for number, own in enumerate(draft.workers)])
    known = Cluster(workers=alike) if cluster is None else cluster
    return replace(known, workers=tuple([replace(own, memory=min(own.memory, most)) for own in known.workers]))


def seats_of(cluster: Cluster, draft: Plan, owners: Owners) -> Seats | None:
    """What may hold the stages of a draft with its workers; None in another layout than the pipeline.

    The holders of a stage wait for each other, so neighbours by speed are together. Where workers alternate several
    stages the fastest come first; those of an ordered cluster have them in their order.

    Raises:
        PlanError: the draft has more workers than there are.
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
    every = sorted(cluster.workers, key=lambda own: (-own.speed, -own.memory, own.node, own.number))
    every = list(cluster.workers) if cluster.ordered else every
    groups, links = _grouped(every, draft), cluster.links
    kinds = [_holders(group, cluster) for group in groups]
    alike = {kind: tuple([g for g, own in zip(groups, kinds, strict=True) if own == kind]) for kind in kinds}
    places = _places(draft, owners)
    between = None if links is None else (links.between.latency_s, links.between.bytes_per_s)
    given = cluster.ordered or len({*places}) < len(places)
    order = [[*alike].index(kinds[place]) for place in places if given]
    return Seats(tuple([replace(kind, groups=own) for kind, own in alike.items()]), tuple(order), between=between)


def placed(
    cluster: Cluster, draft: Plan, owners: Owners, seats: Seats | None, order: Sequence[int]
) -> tuple[tuple[WorkerPlan, ...], list[list[str]]]:
    """The workers of a plan, in the order of the cluster; and for each stage the names of its holders.

    Args:
        cluster: with its workers.
        draft: with its workers.
        owners: of its stages.
        seats: what may hold them; None in another layout than the pipeline.
        order: for each stage the kind that holds it; empty where the workers stand as they are given.
    """
    seat = dict(enumerate(cluster.workers))
    if seats is not None:
        groups = dict(enumerate(_grouped(cluster.workers, draft)))
        left, chosen = (
            [iter(kind.groups) for kind in seats.kinds],
            dict(zip(_places(draft, owners), order, strict=False)),
        )
        groups |= {place: next(left[kind]) for place, kind in chosen.items()}
        seat = {n: one for own in owners for n, one in zip(own, groups[own[0] // draft.mesh_size], strict=True)}
    used = sorted({seat[n] for own in owners for n in own}, key=lambda one: one.number)
    workers = [
        replace(w, name=own.name, speed=own.speed, threads=own.threads or w.threads)
        for w, own in zip(draft.workers, used, strict=True)
    ]
    return tuple(workers), [[seat[n].name for n in own] for own in owners]


def _places(draft: Plan, owners: Owners) -> list[int]:
    """For each stage its place in the pipeline."""
    return [own[0] // draft.mesh_size for own in owners]


def _grouped(workers: Sequence[ClusterWorker], draft: Plan) -> list[tuple[ClusterWorker, ...]]:
    size = draft.replicas * draft.mesh_size
    return [tuple(workers[i : i + size]) for i in range(0, len(workers) - size + 1, size)]


def _holders(group: Sequence[ClusterWorker], cluster: Cluster) -> Holders:
    nodes = tuple([own.node for own in group if cluster.links])
    return Holders((), min(own.speed for own in group), min(own.memory for own in group), nodes)
