"""Modules that backwards run again: what a person says, what it spares, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.frontend import Captured
from roundelay.frontend.stage_profiler import StageProfile
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.lower.partition import can_recompute
from roundelay.lower.recompute_selection import nothing_to_recompute, parts_of, parts_within

NONE = "none"
"""In place of names: no module, not even one that the model checkpoints."""


def names_in(asked: str | Sequence[str]) -> tuple[str, ...]:
    """The names of ``a,b``, or of a list."""
    names = asked.split(",") if isinstance(asked, str) else asked
    return tuple(name for one in names if (name := one.strip()) and name != NONE)


def names_for(captured: Captured, backward: str, asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """What is asked for; else, where that changes no bit, the modules that the model's own code checkpoints."""
    if asked is not None:
        return names_in(asked)
    names: list[str] = []
    for path in captured.checkpointed if backward == "stash" else ():
        apart = not any(path == name or path.startswith(name + ".") for name in names)
        if apart and any(can_recompute(captured.graph, part) for part in parts_within(captured.graph, path)):
            names = [*(name for name in names if not name.startswith(path + ".")), path]
    return tuple(names)


def again(graph: Graph, plan: Plan) -> tuple[range, ...]:
    """Operations whose forward a backward runs again.

    Raises:
        PlanError: a name stands for no module.
    """
    if plan.backward == "recompute":
        return (range(len(graph.ops) + 1),)
    return tuple(range(part.start, part.stop) for part in parts_of(graph, plan.recompute))


def spared(
    graph: Graph, plan: Plan, stages: Partition, measured: Sequence[StageProfile], *, asked: bool
) -> tuple[str, ...]:
    """For each stage what it keeps less, in words.

    Raises:
        PlanError: a module was asked for that keeps nothing beside its inputs and outputs.
    """
    parts, saved, told = parts_of(graph, plan.recompute), dict.fromkeys(plan.recompute, 0), []
    for stage, profile in zip(stages.stages, measured, strict=True):
        for number, num_bytes in zip(stage.recomputed, profile.spared_bytes, strict=True):
            start = stage.segments[number].start
            saved[next(part.name for part in parts if part.start <= start < part.stop)] += num_bytes
        if stage.recomputed:
            count, total = len(stage.recomputed), sum(profile.spared_bytes)
            told.append(
                f"recompute: stage {stage.stage} runs {count} segment{'s' * (count > 1)} again in every backward, and "
                f"keeps {total} bytes less of a micro-batch"
            )
    for name, num_bytes in saved.items():
        if asked and not num_bytes:
            raise nothing_to_recompute(name, "which keeps nothing beside its inputs and outputs")
    return tuple(told)


def meaning(captured: Captured, plan: Plan) -> tuple[str, ...]:
    """What is run again, and with which weights; and what the model checkpoints, if that is left out."""
    if not plan.recompute:
        own = ",".join(captured.checkpointed)
        return (f"recompute: not what the model checkpoints, {own}",) if own and plan.backward != "recompute" else ()
    reads = "its forward's weights: no bit differs" if plan.backward == "stash" else "the weights that it reads"
    return (f"recompute: {', '.join(plan.recompute)}; the backward runs these modules forward again, with {reads}",)
