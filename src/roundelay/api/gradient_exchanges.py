"""Plan what the replicas of each stage exchange."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch

from roundelay.frontend import Captured
from roundelay.ir.exchange import all_reduce
from roundelay.ir.plan import ExchangePlan
from roundelay.ir.stage import Partition, StageSpec
from roundelay.runtime.gradient_bucket import GradientBucket


def plan_exchanges(
    captured: Captured, stages: Partition, replicas: int, unused: Sequence[Sequence[str]] = ()
) -> tuple[ExchangePlan, ...]:
    """The gradients of each stage, all together, reduced over the replicas; nothing where there is one.

    Args:
        captured: the model.
        stages: its stages.
        replicas: R.
        unused: for each stage, trained parameters that get no gradient; empty if that has not been looked at.
    """
    if replicas == 1:
        return ()
    left_out = unused or repeat(())
    return tuple(_exchange(captured, spec, tuple(names)) for spec, names in zip(stages.stages, left_out, strict=False))


def _exchange(captured: Captured, spec: StageSpec, unused: tuple[str, ...]) -> ExchangePlan:
    own = captured.parameters()
    trained = [n for n in spec.parameters if captured.graph.parameters[n].trainable and n not in unused]
    bucket = GradientBucket.of((n, own[n]) for n in trained)
    return ExchangePlan(
        stage=spec.stage,
        kind="weight-gradient",
        phases=tuple(map(str, all_reduce())),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in (*bucket.dtypes, torch.float64)),
        elements=bucket.elements,
        unused=unused,
    )
