"""How many stages a plan gets in its layout, and how many slots its edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundelay.errors import PlanError, counted
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.lower.reading import read
from roundelay.planner.cost_model import boundaries_of
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planning.cuts import Cut, count_stages, default_workers
from roundelay.schedules import PIPELINE, holders_of


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


def slots_in_layout(draft: Plan, source: int, target: int) -> int:
    """The slots of an edge: within a worker enough for all micro-batches; else as many as are on the way in time.

    A micro-batch comes every 2S/N steps, and is T - S steps on its way from stage S to stage T, of which the holders
    take it in turns.
    """
    form = read(draft).form
    if form is None or not form.deals:
        return draft.micro_batches
    on_the_way = (target - source) * draft.micro_batches // (2 * draft.num_stages) + 1
    return -(-on_the_way // holders_of(target, draft.num_stages, draft.micro_batches))
