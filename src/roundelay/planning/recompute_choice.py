"""Choose the modules that backwards recompute, and report what that saves."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.frontend import Captured
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.lower.partition import can_recompute
from roundelay.lower.recompute_selection import nothing_to_recompute, parts_of, parts_within
from roundelay.planner.draft_plan import parse_names
from roundelay.planning.stage_profiler import StageProfile


def choose_modules(captured: Captured, backward: str, requested: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the requested names; else, where no bit changes, the modules that the model's own code checkpoints."""
    if requested is not None:
        return parse_names(requested)
    names: list[str] = []
    for path in captured.checkpointed if backward == "stash" else ():
        separate = not any(path == name or path.startswith(name + ".") for name in names)
        if separate and any(can_recompute(captured.graph, part) for part in parts_within(captured.graph, path)):
            names = [*(name for name in names if not name.startswith(path + ".")), path]
    return tuple(names)


def recomputed_ranges(graph: Graph, plan: Plan) -> tuple[range, ...]:
    """The operations whose forward the backward runs again.

    Raises:
        PlanError: a name stands for no module.
    """
    if plan.backward == "recompute":
        return (range(len(graph.ops) + 1),)
    return tuple(range(part.start, part.stop) for part in parts_of(graph, plan.recompute))


def describe_savings(
    graph: Graph, plan: Plan, stages: Partition, measured: Sequence[StageProfile], *, requested: bool
) -> tuple[str, ...]:
    """Describe for each stage the bytes that recomputing saves.

    Raises:
        PlanError: a requested module keeps nothing but its inputs and outputs.
    """
    parts, saved, notices = parts_of(graph, plan.recompute), dict.fromkeys(plan.recompute, 0), []
    for stage, profile in zip(stages.stages, measured, strict=True):
        for number, num_bytes in zip(stage.recomputed, profile.spared_bytes, strict=True):
            start = stage.segments[number].start
            saved[next(part.name for part in parts if part.start <= start < part.stop)] += num_bytes
        if stage.recomputed:
            count, total = len(stage.recomputed), sum(profile.spared_bytes)
            notices.append(
                f"recompute: stage {stage.stage} runs {count} segment{'s' * (count > 1)} again in every backward, and "
                f"keeps {total} bytes less of a micro-batch"
            )
    for name, num_bytes in saved.items():
        if requested and not num_bytes:
            raise nothing_to_recompute(name, "which keeps nothing but its inputs and outputs")
    return tuple(notices)
