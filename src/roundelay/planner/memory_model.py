"""What a plan predicts that each worker holds, in bytes, item by item.

Weights, gradients and the optimizer's state are there all the time; the largest numbers of versions, tapes and messages
come from the simulated run. All are taken at their largest, so that the sum is an upper bound of the items; what torch
itself, its allocator's gaps and the values inside one instruction take is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from roundelay.errors import UsageError
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.verify_schedule import programs_of
from roundelay.simulator import simulate

WARM = 4
"""Batches beside one per stage, in which every peak of a schedule has been reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that one worker is predicted to hold.

    Args:
        weights: the newest.
        gradients: of one batch.
        optimizer: its state, and what weight prediction keeps of the last update.
        versions: weights beside the newest: stashed or predicted.
        tapes: of all forwards that wait for their backward, and of backwards that wait for their second half.
        messages: on the way to it or unread.
    """

    weights: int
    gradients: int
    optimizer: int
    versions: int
    tapes: int
    messages: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def estimate_memory(plan: Plan, optimizer_bytes: Sequence[int]) -> tuple[MemoryEstimate, ...]:
    """What each worker is predicted to hold.

    Args:
        plan: the plan; its messages, tapes and weights are counted in bytes.
        optimizer_bytes: for each stage, the optimizer's state, which no plan knows.

    Raises:
        PlanError: the plan cannot be obeyed.
        UsageError: not one number per stage.
    """
    if len(optimizer_bytes) != plan.num_stages:
        raise UsageError(
            "optimizer_bytes of a ledger",
            got=f"{len(optimizer_bytes)} numbers",
            expected=f"{plan.num_stages}, one per stage",
            remedy="Give 0 for a stage whose optimizer has no state.",
        )
    batches = [plan.micro_batches] * (plan.num_stages + WARM)
    simulated = simulate(plan, programs_of(plan), stream(batches))
    ledgers = []
    for stages, worker in zip(plan.worker_stages, simulated.workers, strict=True):
        weights = sum(plan.stages[k].parameter_bytes for k in stages)
        ledgers.append(
            MemoryEstimate(
                weights=weights,
                gradients=weights,
                optimizer=sum(optimizer_bytes[k] for k in stages),
                versions=(worker.versions_held_peak - 1) * weights,
                tapes=worker.tape_bytes_peak,
                messages=worker.unread_bytes_peak,
            )
        )
    return tuple(ledgers)
