"""Choose the modules that backwards recompute."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.lower.partition import can_recompute
from roundelay.lower.recompute_selection import ranges_within, recompute_ranges
from roundelay.planner.draft_plan import parse_names


def choose_modules(
    graph: Graph, checkpointed: Sequence[str], backward: str, requested: str | Sequence[str] | None
) -> tuple[str, ...]:
    """Return the requested names; else, where no bit changes, the modules that the model's own code checkpoints."""
    if requested is not None:
        return parse_names(requested)
    names: list[str] = []
    for path in checkpointed if backward == "stash" else ():
        separate = not any(path == name or path.startswith(name + ".") for name in names)
        if separate and any(can_recompute(graph, part) for part in ranges_within(graph, path)):
            names = [*(name for name in names if not name.startswith(path + ".")), path]
    return tuple(names)


def recomputed_positions(graph: Graph, plan: Plan) -> tuple[range, ...]:
    """The operations whose forward the backward runs again.

    Raises:
        PlanError: a name stands for no module.
    """
    if plan.backward == "recompute":
        return (range(len(graph.ops) + 1),)
    return tuple(range(part.start, part.stop) for part in recompute_ranges(graph, plan.recompute))
