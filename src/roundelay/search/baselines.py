"""The plans that an expert would try first, by name. No torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roundelay.planner.draft_plan import NO_MODULES, PLAIN
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.search.space import ALONE, transports_of


def baselines(given: Choices, machine: Hardware, workers: int) -> Mapping[str, Choices]:
    """Choices of each family: one process, data parallel, ZeRO, Megatron, a pipeline.

    Args:
        given: pins that all of them have.
        machine: where they would run.
        workers: in all.
    """
    *_, transport = transports_of(given, machine)
    rule = given.rule or PLAIN
    own = replace(given, workers=1, rule=rule, recompute=given.recompute or NO_MODULES)
    found = {ALONE: replace(own, transport=given.transport or "memory")}
    if workers > 1:
        between = replace(own, transport=transport)
        replicas = replace(between, data_parallel=workers)
        found |= {"data parallel": replicas}
        found |= {f"ZeRO-{level}": replace(replicas, zero=level) for level in (1, 2, 3)}
        found |= {"Megatron": replace(between, tensor_parallel=workers)}
        found |= {"pipeline": replace(between, workers=workers)}
        if rule == PLAIN:
            found |= {"DDP, overlapped": replace(replicas, workers=None, layout="dp")}
    pins = replace(given, workers=None)
    return {name: one for name, one in found.items() if one.over(pins) == one and pins.over(one) == one}
