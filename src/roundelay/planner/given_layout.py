"""Choices as they are in a layout, and which workers then hold which stages. No torch is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundelay.errors import PlanError, did_you_mean
from roundelay.schedules import LAYOUTS, PIPELINE, Schedule, holders_of

REPLICATED, OTHERWISE = 2, 4
"""Micro-batches of a batch by default, where each has a worker, and where not."""


def has_size(given: Mapping[str, Any]) -> bool:
    """Whether a layout's number of micro-batches is given, or a pipeline is asked for."""
    return given.get("layout", PIPELINE) == PIPELINE or bool(given.keys() & {"micro_batches", "data_parallel"})


def in_layout(given: Mapping[str, Any]) -> dict[str, Any]:
    """The choices as they are in the given layout: with N micro-batches, or N replicas of one micro-batch each.

    Raises:
        PlanError: there is no such layout, or a choice does not go with it.
    """
    layout = given.get("layout", PIPELINE)
    if layout not in LAYOUTS:
        _check_pipeline(given, layout)
        return dict(given)
    form = LAYOUTS[layout]
    _refuse(given, layout, "workers", "none: the layout says how many there are")
    if not form.replicates:
        _refuse(given, layout, "data_parallel", "none: give --micro-batches")
    numbers = {name: given[name] for name in ("micro_batches", "data_parallel") if name in given}
    size = next(iter(numbers.values()), REPLICATED if form.replicates else given.get("stages", OTHERWISE))
    if len(set(numbers.values())) > 1 or size < 1:
        raise PlanError(
            f"--layout {layout}",
            got=" and ".join(f"--{name.replace('_', '-')} {number}" for name, number in numbers.items()),
            expected="N micro-batches of a batch, from 1; in dp, --data-parallel N says the same",
            remedy="Give --micro-batches.",
        )
    own = {"data_parallel": size, "micro_batches": 1} if form.replicates else {"micro_batches": size}
    return {**given, **own, "stages": given.get("stages", size)}


def _check_pipeline(given: Mapping[str, Any], layout: str) -> None:
    if layout != PIPELINE:
        raise PlanError(
            "--layout",
            got=repr(layout),
            expected=f"one of {', '.join([PIPELINE, *LAYOUTS])}",
            remedy=did_you_mean(layout, [PIPELINE, *LAYOUTS]) + "Correct it.",
        )
    _refuse(given, layout, "stages", "none: each worker of a pipeline has one stage, or as many as its rule says")


def _refuse(given: Mapping[str, Any], layout: str, name: str, expected: str) -> None:
    if name in given:
        raise PlanError(
            f"--{name.replace('_', '-')} with layout {layout}",
            got=str(given[name]),
            expected=expected,
            remedy="Leave it out.",
        )


def owners_of(
    schedule: Schedule, layout: str, num_stages: int, sizes: tuple[int, int, int]
) -> tuple[Sequence[tuple[int, ...]], int]:
    """For each stage, the numbers of the workers that hold it; and how many workers there are.

    Args:
        schedule: suggests the placement in a replica.
        layout: of the plan.
        num_stages: S.
        sizes: replicas, places of the mesh, and micro-batches of a batch.
    """
    replicas, parts, size = sizes
    if layout in LAYOUTS and LAYOUTS[layout].deals:
        counts = [holders_of(stage, num_stages, size) for stage in range(num_stages)]
        return [tuple(range(sum(counts[:k]), sum(counts[: k + 1]))) for k in range(num_stages)], sum(counts)
    place = schedule.place(num_stages)
    each = len(set(place))
    owners = [
        tuple([(r * each + worker) * parts + part for r in range(replicas) for part in range(parts)])
        for worker in place
    ]
    return owners, replicas * each * parts
