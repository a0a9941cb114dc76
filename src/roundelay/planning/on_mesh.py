"""Put a captured model on a plan's mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundelay.frontend import Captured
from roundelay.frontend.mesh.functional_writes import without_writes
from roundelay.frontend.mesh.written_out_softmax import written_out
from roundelay.frontend.sharding import parameter_places, sharded, sharded_ops
from roundelay.ir.plan import Plan
from roundelay.lower.laid_graph import LaidGraph
from roundelay.planner.mesh_signatures import MeshFacts, lay, residences_of


def on_mesh(captured: Captured, plan: Plan) -> Captured:
    """The model on the workers of a plan's mesh, with its boxings in the graph; itself without a mesh.

    Raises:
        PlanError: a signature or a pattern does not fit, or a boxing has no place.
    """
    plain = without_writes_of(captured) if plan.mesh_size > 1 else captured
    rewritten = plain

    def rewrite(names: Sequence[str]) -> MeshFacts:
        nonlocal rewritten
        rewritten = with_softmaxes(plain, names)
        return mesh_facts(rewritten)

    facts = mesh_facts(plain) if plan.mesh_size > 1 else MeshFacts(captured.graph, (), {})
    laid = lay(facts, plan, rewrite)
    if laid is None:
        found = residences_of(plan, captured.graph)
        return replace(captured, residences=found, whole=(captured.whole or captured) if found else None)
    parts = sharded(rewritten.builder, laid.graph.graph, laid.forms, laid.deduction, laid.graph.parts)
    return replace(rewritten.on(laid.graph.graph, parts), residences=laid.graph.residences, whole=captured)


def mesh_facts(captured: Captured) -> MeshFacts:
    """What the signatures of a model are deduced from; sizes that vary with the batch are torch's."""
    exported = captured.builder.exported
    return MeshFacts(captured.graph, tuple(sharded_ops(exported, captured.graph)), parameter_places(exported))


def without_writes_of(captured: Captured) -> Captured:
    """The model in which writes in place make new values; itself, if there are none."""
    exported = captured.builder.exported
    plain = without_writes(exported)
    return captured if plain is exported else captured.rewritten(plain)


def with_softmaxes(captured: Captured, names: Sequence[str]) -> Captured:
    """The model in which these softmaxes are written out."""
    return captured.rewritten(written_out(captured.builder.exported, names))


def laid_of(captured: Captured) -> LaidGraph:
    """The model as it lies on its mesh, for those that need no torch."""
    own = captured.sharding
    if own is None:
        return LaidGraph(captured.graph, residences=captured.residences)
    return LaidGraph(captured.graph, own.parts, own.boxes, own.parameters, own.gradients, captured.residences)
