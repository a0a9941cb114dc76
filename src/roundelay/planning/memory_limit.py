"""Refuses a plan whose workers would hold more than a number of bytes, before anything is trained.

Elsewhere a device that is too small is found while training, or stands still with what two branches hold (OneFlow,
Sect. 2.3, Fig. 2). Here all that workers will hold is known from the plan: see :mod:`roundelay.planner.memory_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

from roundelay.errors import PlanError
from roundelay.ir.num_bytes import bytes_text, parse_bytes
from roundelay.ir.plan import Plan
from roundelay.lower.partition import partition
from roundelay.planner.cluster import Cluster
from roundelay.planner.kept_bytes import again_in, made_again
from roundelay.planner.memory_model import MemoryEstimate, estimate_memory, limits_of
from roundelay.planner.plan_options import Choices
from roundelay.planning.compile_stages import for_plan
from roundelay.planning.examined import Examined
from roundelay.planning.memory_report import optimizer_bytes
from roundelay.schedules import PIPELINE

_T = TypeVar("_T")

SHARES: Final = (1.0, 1.15, 0.85, 0.7)
"""Of a limit, for the estimate by which cuts are chosen."""

_REMEDY = (
    "Give more --workers or --tensor-parallel, --zero 1 with replicas, --recompute all, more --micro-batches, or a "
    "rule that holds fewer versions."
)
_REMEDY_IN_LAYOUTS = "Give more --micro-batches, --recompute all, --cuts memory-time, or another --layout: mp or zero."


def within_limit(choices: Choices) -> Iterator[Choices]:
    """Choices for cuts to try in turn: the fastest, then the fastest that fit a limit, and some others around it.

    What stages will hold is known exactly only when they are cut; until then it is an estimate.
    """
    limit = choices.memory_limit
    if limit is None or choices.cuts is not None:
        yield choices
        return
    most = parse_bytes(limit, "--memory-limit")
    for share in (None, *SHARES):
        yield replace(choices, memory_limit=None if share is None else int(share * most))


def first_allowed(tries: Iterable[tuple[Hashable, Callable[[], _T]]]) -> _T:
    """Make the first of some things that is not refused; those that are the same are made once.

    Args:
        tries: of each, what it is, and how to make it.

    Raises:
        PlanError: all are refused; that of the last.
    """
    refused: dict[Hashable, PlanError] = {}
    for what, make in tries:
        if what not in refused:
            try:
                return make()
            except PlanError as error:
                refused[what] = error
    raise [*refused.values()][-1]


def check_memory(source: Examined, plan: Plan, limit: str | int | None, cluster: Cluster | None = None) -> None:
    """Check that no worker is predicted to hold more than a limit, if there is one.

    Args:
        source: the job.
        plan: a plan that fits it.
        limit: bytes of each worker, such as ``8GiB``; None for any number.
        cluster: has its workers, with limits of their own.

    Raises:
        PlanError: naming the worker that holds most, and what; or the optimizer's state is not known.
    """
    each = math.inf if limit is None else parse_bytes(limit, "--memory-limit")
    limits = limits_of(plan, each, cluster)
    if min(limits) == math.inf:
        return
    estimates = predicted_memory(source, plan)
    if estimates is None:
        raise PlanError(
            "--memory-limit" if limit is not None else "memory of the cluster's workers",
            got="an optimizer whose state is not known before its first step",
            expected="one that can step on tensors without memory, as those of torch.optim can",
            remedy="Leave it out; `summary.json` of a run says what was held.",
        )
    pairs = enumerate(zip(estimates, limits, strict=True))
    worker, (largest, most) = max(pairs, key=lambda pair: pair[1][0].total - pair[1][1])
    if largest.total > most:
        raise PlanError(
            f"memory of worker {worker}, which runs " + _stages(plan, worker),
            got=f"{bytes_text(largest.total)} ({_items(largest)})",
            expected=f"at most {bytes_text(most)}, by " + ("--memory-limit" if most == each else "the cluster file"),
            remedy=_REMEDY if plan.layout == PIPELINE else _REMEDY_IN_LAYOUTS,
        )


def predicted_memory(source: Examined, plan: Plan) -> tuple[MemoryEstimate, ...] | None:
    """What each worker is predicted to hold; None if the optimizer cannot step on meta tensors.

    Args:
        source: the job.
        plan: a plan that fits it.
    """
    laid, whole = for_plan(source.captured, plan), source.lowered(plan)
    stages = partition(laid.graph, [stage.segments for stage in plan.stages], plan.recompute)
    of_optimizer = optimizer_bytes(source.job, laid, stages, plan)
    if of_optimizer is None:
        return None
    parts = [again_in(laid.graph, spec, plan.backward) for spec in stages.stages]
    kept = whole.storages(plan) if any(parts) else None
    again = [] if kept is None else [made_again(whole.graph, kept, own) for own in parts]
    return estimate_memory(plan, of_optimizer, again)


def _stages(plan: Plan, worker: int) -> str:
    own = plan.stages_of(worker)
    return f"stage {own[0]}" if len(own) == 1 else "stages " + " and ".join(map(str, own))


def _items(estimate: MemoryEstimate) -> str:
    return ", ".join(f"{name} {bytes_text(count)}" for name, count in estimate.items().items() if count)
