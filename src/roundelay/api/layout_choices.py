"""The choices of a layout: how many micro-batches and stages it has, and which workers hold which stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundelay.api.cuts import Cut, count_stages, default_workers
from roundelay.api.holder_choices import parts_of, replicas_of
from roundelay.errors import PlanError, counted
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.lower.channels import form_of
from roundelay.planner.cost_model import boundaries_of
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
            remedy="Correct it.",
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


def num_stages_of(
    graph: Graph, workers: int | None, given_cut: Cut | None, rule: str, given: Mapping[str, Any], *, requested: bool
) -> tuple[int, str]:
    """How many stages a plan gets, and why fewer than by default, if so.

    Args:
        graph: of the model.
        workers: of each replica of a pipeline, as given.
        given_cut: the cut as given.
        rule: update rule.
        given: choices as of :func:`in_layout`.
        requested: whether the number of stages of a layout is given.

    Raises:
        PlanError: the numbers do not fit.
        CaptureError: the model cannot be cut into so many.
    """
    if given.get("layout", PIPELINE) == PIPELINE:
        where = given.get("devices"), given.get("transport", "memory")
        default = default_workers(replicas_of(given) * parts_of(given), *where)
        return count_stages(graph, workers, given_cut, rule, default)
    cut_into = None if given_cut is None else len(given_cut.stages)
    return _stages_in_layout(graph, given["stages"], cut_into, requested=requested)


def _stages_in_layout(graph: Graph, wanted: int, cut: int | None, *, requested: bool) -> tuple[int, str]:
    """The same in a layout, from the number that is given, or by default, and that of the cuts, if these are given."""
    most = len(boundaries_of(graph)) - 1
    if cut is not None and requested and cut != wanted:
        raise PlanError("--stages", got=str(wanted), expected=f"{cut}, as the cuts", remedy="Leave one of them out.")
    if cut is not None or 0 < wanted <= most:
        return cut or wanted, ""
    if requested:
        expected = f"1 to {most}, into which the model can be cut"
        raise PlanError("--stages", got=str(wanted), expected=expected, remedy="Give one of these.")
    return most, f"{counted(most, 'stage')}, not {wanted}: the model cannot be cut into more"


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


def slots_in_layout(draft: Plan, source: int, target: int) -> int:
    """The slots of an edge: within a worker enough for all micro-batches; else as many as are on the way in time.

    A micro-batch comes every 2S/N steps, and is T - S steps on its way from stage S to stage T, of which the holders
    take it in turns.
    """
    form = form_of(draft)
    if form is None or not form.deals:
        return draft.micro_batches
    on_the_way = (target - source) * draft.micro_batches // (2 * draft.num_stages) + 1
    return -(-on_the_way // holders_of(target, draft.num_stages, draft.micro_batches))
