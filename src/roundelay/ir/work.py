"""Work: all that one worker is sent. Beside it a worker needs the captured model and the job, but no plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from roundelay.ir.clip import Clip
from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.program import Program


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all workers of a run have in common.

    Args:
        transport: how messages travel.
        deadline_s: seconds after which a silent wait is an error.
        devices: where each worker computes.
        replicas: R.
        shards: S, neighbouring replicas among which a parameter is split that is not whole in each.
        micro_batches: M, of each replica.
        predictor: how weights are predicted.
        clip: how gradients are clipped.
        loss_scale: by what losses are multiplied.
        ema: decay of the weights' moving average; 0 for none.
        needs_norm: whether stage 0 needs the norm of the whole model's gradient.
        awaits_norm: whether each update waits for it.
    """

    transport: str
    deadline_s: float
    devices: tuple[str, ...]
    replicas: int
    shards: int
    micro_batches: int
    predictor: str
    clip: Clip
    loss_scale: LossScale
    ema: float
    needs_norm: bool
    awaits_norm: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """A stage on one of its holders.

    Args:
        stage: k.
        holder: its number among the stage's holders.
        replica: which of the replicas it is of.
        place: where in the mesh it is.
        moves: whether the stage's state goes from holder to holder.
        updates: whether this holder makes the stage's updates.
        reads_older: whether a forward reads an older version than the newest by the rule's table.
        exchanges: what the stage's holders exchange.
        sums: the channel by which the memory of the stage's sums is known; -1 where none are handed on.
    """

    stage: int
    holder: int
    replica: int
    place: int
    moves: bool
    updates: bool
    reads_older: bool
    exchanges: tuple[ExchangePlan, ...]
    sums: int = -1

    @property
    def unused(self) -> frozenset[str]:
        """Names of trained parameters that get no gradient."""
        return frozenset(name for exchange in self.exchanges for name in exchange.unused)

    @property
    def summed(self) -> ExchangePlan:
        """What holders hand on to one another, where :attr:`sums` says that they do."""
        return next(exchange for exchange in self.exchanges if not exchange.phases)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one worker is sent.

    Args:
        program: its program.
        threads: intra-op threads with which it computes on the CPU.
        settings: what it has in common with the others.
        stages: those that it runs, in order.
        exchanges: those that it takes part in, by channel.
    """

    program: Program
    threads: int
    settings: Settings
    stages: tuple[StageWork, ...]
    exchanges: Mapping[int, ExchangePlan] = field(hash=False)

    def stage(self, number: int) -> StageWork:
        """One of its stages."""
        return next(own for own in self.stages if own.stage == number)
