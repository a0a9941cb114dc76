"""Report what recomputing modules saves."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.lower.recompute_selection import nothing_to_recompute, recompute_ranges
from roundelay.planning.stage_profiler import StageProfile


def describe_savings(
    graph: Graph, plan: Plan, stages: Partition, measured: Sequence[StageProfile], *, requested: bool
) -> tuple[str, ...]:
    """Describe for each stage the bytes that recomputing saves.

    Raises:
        PlanError: a requested module keeps nothing but its inputs and outputs.
    """
    parts, saved, notices = recompute_ranges(graph, plan.recompute), dict.fromkeys(plan.recompute, 0), []
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
