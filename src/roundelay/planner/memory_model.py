"""Predicts the memory of each worker, in bytes, item by item.

Weights, gradients and optimizer state are held all the time; the peak numbers of versions, tapes and messages come from
a simulated run. Where the order is free, tapes and versions are those of all forwards that the plan allows in flight:
a run may hold more than the simulated one. The total adds the peaks of all items, so it is an upper bound of
them. It does not include torch itself, fragmentation of its allocator, or temporary values inside one instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from roundelay.errors import UsageError
from roundelay.ir.exchange import GRADIENT_PARTS, WEIGHT_FORWARD
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_plan
from roundelay.planner.cluster import Cluster
from roundelay.simulator import simulate

WARM = 4
"""Batches to simulate in addition to one per stage, so that every peak of a schedule is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that one worker is predicted to hold.

    Args:
        weights: the newest version.
        gradients: gradients of one batch.
        optimizer: optimizer state, and what weight prediction keeps of the last update.
        versions: versions other than the newest, stashed or predicted.
        tapes: tapes of forwards in flight, what backwards keep for their second half, and what one computes again.
        messages: messages on the way to it or unread.
    """

    weights: int
    gradients: int
    optimizer: int
    versions: int
    tapes: int
    messages: int

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        """Return the items by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def estimate_memory(
    plan: Plan, optimizer_bytes: Sequence[int], again_bytes: Sequence[int] = ()
) -> tuple[MemoryEstimate, ...]:
    """Predict the memory of each worker.

    Args:
        plan: the plan, which has the bytes of weights, tapes and messages.
        optimizer_bytes: for each stage, the bytes of optimizer state, which are not in the plan.
        again_bytes: for each stage, the bytes of what its backward computes again
            (:func:`roundelay.planner.kept_bytes.made_again`), which are not either; by default none.

    Raises:
        PlanError: the plan is invalid.
        UsageError: not one number per stage.
    """
    if len(optimizer_bytes) != plan.num_stages:
        raise UsageError(
            "optimizer_bytes of a memory estimate",
            got=f"{len(optimizer_bytes)} numbers",
            expected=f"{plan.num_stages}, one per stage",
            remedy="Give 0 for a stage whose optimizer has no state.",
        )
    batches = [plan.micro_batches] * (plan.num_stages + WARM)
    simulated = simulate(plan, emit(check_plan(plan)), stream(batches))
    estimates = []
    for number, (stages, worker) in enumerate(zip(plan.worker_stages, simulated.workers, strict=True)):
        whole = worker.weight_bytes_peak
        stored = whole - sum(_elsewhere(plan, k, WEIGHT_FORWARD)[0] for k in stages)
        weights, gradients = (
            whole - sum(lacking - most for k in stages for lacking, most in [_elsewhere(plan, k, kind)])
            for kind in (WEIGHT_FORWARD, GRADIENT_PARTS)
        )
        updated = [k for k in stages if read(plan).updater(k) in (None, plan.holder_of(number))]
        estimates.append(
            MemoryEstimate(
                weights=weights,
                gradients=gradients,
                optimizer=sum(optimizer_bytes[k] for k in updated),
                versions=max(worker.versions_held_peak - 1, _older_allowed(plan, stages)) * stored,
                tapes=max(worker.tape_bytes_peak, _tapes_allowed(plan, stages))
                + max([again_bytes[k] for k in stages if again_bytes], default=0),
                messages=worker.unread_bytes_peak,
            )
        )
    return tuple(estimates)


def limits_of(plan: Plan, each: float, cluster: Cluster | None) -> list[float]:
    """Bytes that each worker of a plan may hold: any worker, and those that are declared."""
    known = {} if cluster is None else {worker.name: worker.memory for worker in cluster.workers}
    return [min(each, known.get(worker.name, each)) for worker in plan.workers]


def _older_allowed(plan: Plan, stages: Sequence[int]) -> int:
    """Versions before the newest that forwards in flight may read, where the order is free; else 0."""
    return max(-(-(max(plan.stages[k].in_flight, 1) - 1) // plan.micro_batches) for k in stages)


def _tapes_allowed(plan: Plan, stages: Sequence[int]) -> int:
    """Bytes of the tapes of all forwards that may be in flight, where the order is free; else 0."""
    return sum(plan.stages[k].in_flight * plan.stages[k].tape_bytes for k in stages)


def _elsewhere(plan: Plan, stage: int, kind: str) -> tuple[int, int]:
    """Bytes that others than a holder of a stage have of what it exchanges by segments, and of these one segment's."""
    sizes = [exchange.num_bytes for exchange in plan.exchanges if (exchange.stage, exchange.kind) == (stage, kind)]
    lacking = [size - size // plan.grid.shards for size in sizes]
    return sum(lacking), max(lacking, default=0)
