"""From a plan and its programs to what each worker is sent."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.ir.program import Program
from roundelay.ir.work import Settings, StageWork, Work
from roundelay.lower.channels import channels_of, exchanges_of
from roundelay.lower.emit import reads_older
from roundelay.lower.reading import Reading


def works_of(reading: Reading, programs: Sequence[Program]) -> tuple[Work, ...]:
    """What each worker is sent.

    Args:
        reading: of the plan.
        programs: one for each worker.
    """
    settings, exchanges, sums = _settings(reading), exchanges_of(reading, channels_of(reading)), _sums(reading)
    return tuple(
        [
            Work(
                program=program,
                threads=worker.threads,
                settings=settings,
                stages=tuple([_stage(reading, program.worker, k, sums.get(k, -1)) for k in program.stages]),
                exchanges={c.id: exchanges[c.id] for c in program.channels if c.id in exchanges},
            )
            for worker, program in zip(reading.plan.workers, programs, strict=True)
        ]
    )


def _settings(reading: Reading) -> Settings:
    plan = reading.plan
    return Settings(
        transport=plan.transport,
        deadline_s=plan.deadline_s,
        devices=plan.devices,
        replicas=plan.replicas,
        shards=reading.mesh.shards,
        micro_batches=plan.micro_batches,
        predictor=plan.predictor,
        clip=plan.clip,
        loss_scale=plan.loss_scale,
        ema=plan.ema,
        needs_norm=reading.needs_norm,
        awaits_norm=reading.awaits_norm,
    )


def _stage(reading: Reading, worker: int, stage: int, sums: int) -> StageWork:
    holder = reading.plan.holders(stage).index(worker)
    moves = reading.moves_states
    replica, place = reading.mesh.where(holder)
    return StageWork(
        stage=stage,
        holder=holder,
        replica=0 if moves else replica,  # each holder has all of the stage, while it has its state
        place=place,
        moves=moves,
        updates=reading.updater(stage) in (None, holder),
        reads_older=reads_older(reading, stage, holder),
        exchanges=tuple([exchange for exchange in reading.plan.exchanges if exchange.stage == stage]),
        sums=sums,
    )


def _sums(reading: Reading) -> dict[int, int]:
    """By stage the first channel on which its holders hand on sums, if they do."""
    numbers: dict[int, int] = {}
    for channel in channels_of(reading) if reading.sums_over_time else ():
        if channel.kind == "partial":
            numbers.setdefault(channel.sources[0].stage, channel.id)
    return numbers
