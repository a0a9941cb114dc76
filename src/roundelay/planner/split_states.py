"""ZeRO's choice: which optimizer states are split over the replicas, and which are left whole."""

from __future__ import annotations

from dataclasses import replace

from roundelay.errors import PlanError, listed
from roundelay.ir.plan import Plan
from roundelay.ir.residence import SHARDED
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.ir.sbp import Split
from roundelay.lower.laid_graph import LaidGraph
from roundelay.planner.mesh_signatures import read_once, with_patterns
from roundelay.planner.source import Source


def split_states(source: Source, laid: LaidGraph, plan: Plan, level: int) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the states split that can be, by ``--zero``, and what to say of those that are left whole.

    Raises:
        PlanError: the optimizer may look at the whole of every parameter, or none can be split.
    """
    dims = longest_dimensions(laid, plan.grid.shards)
    if plan.predictor != NO_PREDICTOR:  # each replica predicts what it updates, and that is gathered for its reader
        dims = {name: split for name, split in dims.items() if name in read_once(laid.graph)}
    asked = f"--hybrid {plan.replicas // plan.shards}x{plan.shards}" if plan.shards else f"--zero {level}"
    if not dims:
        raise PlanError(
            asked,
            got=f"no parameter with a dimension as long as the {plan.grid.shards} replicas that would split it",
            expected="fewer replicas, or larger weights",
            remedy="Give fewer, or leave it out.",
        )
    whole = source.whole_states({n: split.dim for n, split in dims.items()})
    why = next(iter(whole.values()), "")
    if whole and len(whole) == len(dims):
        raise PlanError(
            asked,
            got=f"an optimizer with {why}",
            expected="one that treats each element of a parameter alone, as SGD and Adam do: a replica updates a part",
            remedy="Leave it out, or take such an optimizer.",
        )
    split = {name: one for name, one in dims.items() if name not in whole}
    patterns = with_patterns(split, list(laid.graph.parameters))
    states = {name: ((plan.state_axis, signature),) for name, signature in patterns.items()}
    notice = f"Optimizer states left whole: {listed(list(whole))}: {why}"
    return replace(plan, states=states, sharded=SHARDED[:level]), ((notice,) if whole else ())


def longest_dimensions(laid: LaidGraph, replicas: int) -> dict[str, Split]:
    """A split of every parameter's state over replicas, by name: of its longest dimension.

    Left out are dimensions that the mesh splits, and parameters without one that is as long as there are replicas.
    """
    found: dict[str, Split] = {}
    for name, parameter in laid.graph.parameters.items():
        taken = laid.splits.get(name)
        dims = [d for d, size in enumerate(parameter.shape) if size >= replicas and (taken is None or d != taken.dim)]
        if dims and parameter.trainable:
            found[name] = Split(max(dims, key=lambda dim: parameter.shape[dim]))
    return found
