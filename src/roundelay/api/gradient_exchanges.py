"""Plan what the replicas of each stage exchange."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch

from roundelay.errors import PlanError
from roundelay.frontend import Captured
from roundelay.ir.exchange import all_reduce
from roundelay.ir.plan import ExchangePlan, Plan
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


def check_exchanges(captured: Captured, stages: Partition, plan: Plan) -> None:
    """Check that a plan's exchanges are those of its stages.

    Raises:
        PlanError: naming the first that is not.
    """
    needed = plan_exchanges(captured, stages, plan.replicas, [exchange.unused for exchange in plan.exchanges])
    for i, (got, wanted) in enumerate(zip(plan.exchanges, needed, strict=True)):
        if got != wanted:
            raise PlanError(
                f"exchanges[{i}] of the plan",
                got=_text(got),
                expected=f"{_text(wanted)}: the gradients of its stage",
                remedy="Correct the plan, or write a new one with `roundelay plan`.",
            )


def _text(exchange: ExchangePlan) -> str:
    sizes = " and ".join(f"{n} of {dtype}" for n, dtype in zip(exchange.elements, exchange.dtypes, strict=True))
    return f"{exchange.kind} of stage {exchange.stage}, {sizes}"


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
