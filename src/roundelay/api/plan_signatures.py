"""The signatures that a plan gives to parameters: by names and patterns, of which the longest that matches counts."""

from __future__ import annotations

from fnmatch import fnmatchcase

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph
from roundelay.ir.plan import Plan
from roundelay.ir.sbp import Signature, parse


def signatures_of(plan: Plan, graph: Graph) -> dict[str, Signature]:
    """The signature of each parameter that a plan names.

    Raises:
        PlanError: a pattern matches no parameter, an axis is not the mesh's or is named twice, a signature is unknown.
    """
    found: dict[str, Signature] = {}
    for pattern in sorted(plan.parameters, key=len):  # a longer one replaces what a shorter one has said
        names = [name for name in graph.parameters if name == pattern or fnmatchcase(name, pattern)]
        if not names:
            raise PlanError(
                f"parameters of the plan: {pattern!r}",
                got="no parameter of this name or pattern",
                expected=f"one of the model's, such as {', '.join(list(graph.parameters)[:3])}",
                remedy="Correct the plan.",
            )
        for axis, text in _of_axes(plan, pattern):
            assert axis in plan.mesh
            found |= dict.fromkeys(names, parse(text))
    return found


def _of_axes(plan: Plan, pattern: str) -> tuple[tuple[str, str], ...]:
    pairs = plan.parameters[pattern]
    axes = [axis for axis, _ in pairs]
    if len(set(axes)) < len(axes) or not set(axes) <= set(plan.mesh):
        raise PlanError(
            f"parameters of the plan: {pattern!r}",
            got="the axes " + ", ".join(axes),
            expected="each at most once, of the mesh: " + (", ".join(plan.mesh) or "none"),
            remedy="Correct the plan.",
        )
    return pairs
