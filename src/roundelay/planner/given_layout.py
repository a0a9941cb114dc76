"""Choices as they are in a layout, and which workers then hold which stages. No torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundelay.errors import PlanError, did_you_mean
from roundelay.planner.plan_options import Choices, flag
from roundelay.schedules import LAYOUTS, PIPELINE, Schedule, holders_of

REPLICATED, OTHERWISE = 2, 4
"""Micro-batches of a batch by default, where each has a worker, and where not."""


def has_size(choices: Choices) -> bool:
    """Whether a layout's number of micro-batches is given, or a pipeline is asked for."""
    return in_pipeline(choices) or bool(choices.names() & {"micro_batches", "data_parallel"})


def in_pipeline(choices: Choices) -> bool:
    """Whether a pipeline is asked for."""
    return choices.layout in (None, PIPELINE)


def in_layout(choices: Choices) -> Choices:
    """The choices as they are in the given layout: with N micro-batches, or N replicas of one micro-batch each.

    Raises:
        PlanError: there is no such layout, or a choice does not go with it.
    """
    layout = PIPELINE if choices.layout is None else choices.layout
    if layout not in LAYOUTS:
        _check_pipeline(choices, layout)
        return choices
    form = LAYOUTS[layout]
    _refuse(choices, layout, "workers", "none: the layout says how many there are")
    _refuse(choices, layout, "hybrid", "none: no weight is split among its workers")
    if not form.replicates:
        _refuse(choices, layout, "data_parallel", "none: give --micro-batches")
    given = choices.given()
    numbers = {name: given[name] for name in ("micro_batches", "data_parallel") if name in given}
    usual = REPLICATED if form.replicates else OTHERWISE if choices.stages is None else choices.stages
    size = next(iter(numbers.values()), usual)
    if len(set(numbers.values())) > 1 or size < 1:
        raise PlanError(
            f"--layout {layout}",
            got=" and ".join(f"{flag(name)} {number}" for name, number in numbers.items()),
            expected="N micro-batches of a batch, from 1; in dp, --data-parallel N says the same",
            remedy="Give --micro-batches.",
        )
    own = Choices(data_parallel=size, micro_batches=1) if form.replicates else Choices(micro_batches=size)
    return replace(own.over(choices), stages=size if choices.stages is None else choices.stages)


def _check_pipeline(choices: Choices, layout: str) -> None:
    if layout != PIPELINE:
        raise PlanError(
            "--layout",
            got=repr(layout),
            expected=f"one of {', '.join([PIPELINE, *LAYOUTS])}",
            remedy=did_you_mean(layout, [PIPELINE, *LAYOUTS]) + "Correct it.",
        )
    _refuse(choices, layout, "stages", "none: each worker of a pipeline has one stage, or as many as its rule says")


def _refuse(choices: Choices, layout: str, name: str, expected: str) -> None:
    if (value := getattr(choices, name)) is not None:
        raise PlanError(f"{flag(name)} with layout {layout}", got=str(value), expected=expected, remedy="Leave it out.")


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
    if layout in LAYOUTS and LAYOUTS[layout].takes_turns:
        counts = [holders_of(stage, num_stages, size) for stage in range(num_stages)]
        return [tuple(range(sum(counts[:k]), sum(counts[: k + 1]))) for k in range(num_stages)], sum(counts)
    place = schedule.place(num_stages)
    each = len(set(place))
    owners = [
        tuple([(r * each + worker) * parts + part for r in range(replicas) for part in range(parts)])
        for worker in place
    ]
    return owners, replicas * each * parts
