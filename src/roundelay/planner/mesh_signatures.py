"""The signatures that a plan gives to parameters and results, and all that follow from them. No torch is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeVar

from roundelay.errors import PlanError
from roundelay.ir.deduction import Deduction, ShardedOp, Wanted
from roundelay.ir.graph import Graph, Op
from roundelay.ir.op_form import OpForm
from roundelay.ir.plan import Lay, Plan
from roundelay.ir.residence import Residence, dtype_gathered
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.ir.sbp import B, P, Signature, Split
from roundelay.lower.boxed_graph import boxed_graph, with_local_sizes
from roundelay.lower.laid_graph import LaidGraph
from roundelay.lower.megatron import megatron
from roundelay.lower.reading import read
from roundelay.lower.signatures import deduce
from roundelay.lower.validate_mesh import check_mesh


@dataclass(frozen=True, slots=True)
class MeshFacts:
    """What signatures are deduced from.

    Args:
        graph: of the model.
        ops: its operations, with their forms.
        places: the names that parameters have in these, by name.
    """

    graph: Graph
    ops: tuple[ShardedOp, ...]
    places: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelOnMesh:
    """A model on a plan's mesh.

    Args:
        graph: with its boxings.
        deduction: all signatures.
        forms: of its operations, by name.
    """

    graph: LaidGraph
    deduction: Deduction
    forms: Mapping[str, OpForm]


Rewrite = Callable[[Sequence[str]], MeshFacts]
"""From names of softmaxes to the model in which they are written out."""


def lay(facts: MeshFacts, plan: Plan, rewrite: Rewrite) -> ModelOnMesh | None:
    """The model on the workers of a plan's mesh, with its boxings in the graph; None without a mesh.

    Raises:
        PlanError: a signature or a pattern does not fit, or a boxing has no place.
    """
    check_mesh(read(plan))
    residences_of(plan, facts.graph)
    made = without_residences(facts, plan, rewrite)
    if made is None:
        return None
    graph = replace(made.graph, residences=residences_of(plan, made.graph.graph, made.graph.gradients))
    return replace(made, graph=graph)


def without_residences(facts: MeshFacts, plan: Plan, rewrite: Rewrite) -> ModelOnMesh | None:
    """The same as if each replica updated all; it depends on the plan's mesh, parameters and outputs alone."""
    given, outputs, parts = signatures_of(plan, facts.graph), outputs_of(plan, facts.graph), plan.mesh_size
    if parts == 1:
        return None
    for name, signature in given.items():
        _check_signature(facts.graph, name, signature, parts)
    deduction = _deduced(facts, given, outputs, parts)
    if split := [op.name for op in facts.ops if _is_split_softmax(op.form, deduction)]:
        facts = rewrite(split)
        deduction = _deduced(facts, given, outputs, parts)
    boxed = with_local_sizes(boxed_graph(facts.graph, deduction), deduction, facts.places, parts)
    found = {name: deduction.values.get(place, B) for name, place in facts.places.items()}
    gradients = {n: deduction.gradients[place] for n, place in facts.places.items() if place in deduction.gradients}
    graph = LaidGraph(
        graph=boxed,
        parts=parts,
        boxes={box.name: box for box in deduction.boxes},
        splits={name: signature for name, signature in found.items() if isinstance(signature, Split)},
        gradients=gradients,
    )
    return ModelOnMesh(graph, deduction, {op.name: op.form for op in facts.ops})


def _deduced(facts: MeshFacts, given: Mapping[str, Signature], outputs: Mapping[str, Wanted], parts: int) -> Deduction:
    """The signatures that follow from those of parameters and results."""
    graph, places = facts.graph, facts.places
    weights = {places[n]: float(p.num_bytes) for n, p in graph.parameters.items() if p.trainable and n in places}
    sizes = {name: float(value.num_bytes) for name, value in graph.values.items()} | weights
    seeds = {places[name]: signature for name, signature in given.items()}
    return deduce(facts.ops, seeds, sizes, parts, dict.fromkeys(graph.outputs, B), weights, outputs)


def _is_split_softmax(form: OpForm, deduction: Deduction) -> bool:
    """Whether an operation runs over a dimension that is split, so that all of it would have to be gathered."""
    if form.over is None:
        return False
    name, dim = form.over
    own = deduction.values.get(name)
    return isinstance(own, Split) and own.dim == dim


def tensor_parallel(facts: MeshFacts, parts: int) -> dict[str, Signature]:
    """Megatron-LM's signatures of parameters, by name or pattern (:func:`roundelay.lower.megatron.megatron`).

    Raises:
        PlanError: nothing in the model can be split so.
    """
    found = megatron(facts.ops, shapes_of(facts), parts).signatures
    if not found:
        raise PlanError(
            f"--tensor-parallel {parts}",
            got="a model without two matrix products, one after the other, that can be split into so many parts",
            expected="linear, activation, linear, or an attention, whose columns and heads can be divided",
            remedy="Give --data-parallel, or say in the plan's `parameters` what is to be split.",
        )
    names = {place: name for name, place in facts.places.items()}
    return with_patterns({names[place]: signature for place, signature in found.items()}, list(facts.graph.parameters))


def shapes_of(facts: MeshFacts) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters, by place."""
    return {place: facts.graph.parameters[name].shape for name, place in facts.places.items()}


def as_pattern(name: str) -> str:
    """A path with ``*`` in place of its numbers."""
    return ".".join("*" if step.isdecimal() else step for step in name.split("."))


T = TypeVar("T")


def with_patterns(found: Mapping[str, T], every: Sequence[str]) -> dict[str, T]:
    """Signatures or lays by pattern, with ``*`` in place of numbers, where all that match it have the same one."""
    result: dict[str, T] = {}
    patterns = {name: as_pattern(name) for name in found}
    matching = {p: [found.get(n) for n in every if fnmatchcase(n, p)] for p in dict.fromkeys(patterns.values())}
    for name, signature in found.items():
        alike = all(own == signature for own in matching[patterns[name]])
        result[patterns[name] if alike else name] = signature
    return result


def signatures_of(plan: Plan, graph: Graph) -> dict[str, Signature]:
    """The signature of each parameter that a plan names.

    Raises:
        PlanError: a pattern matches no parameter, an axis is not the mesh's or is named twice, a signature is unknown.
    """
    return _matched("parameters", plan.parameters, graph, tuple(plan.mesh))


def outputs_of(plan: Plan, graph: Graph) -> dict[str, Wanted]:
    """What a plan wants of the results of operations, by name; that of a module is its last operation's.

    Raises:
        PlanError: as :func:`signatures_of`.
    """
    last: dict[str, str] = {}  # by module, or operation
    for op in graph.ops:
        steps = op.module.split(".") if op.module else []
        last |= {".".join(steps[: i + 1]): op.name for i in range(len(steps))} | {op.name: op.name}
    found: dict[str, Wanted] = {}
    for pattern in sorted(plan.outputs, key=len):
        names = _named("outputs", pattern, list(last), "module or operation")
        for signature in _given("outputs", plan.outputs, pattern, tuple(plan.mesh)):
            found |= {last[name]: Wanted(signature, name == pattern) for name in names}
    return found


_NONE: Mapping[str, Signature] = MappingProxyType({})


def residences_of(plan: Plan, graph: Graph, gradients: Mapping[str, Signature] = _NONE) -> dict[str, Residence]:
    """How the parameters that a plan names lie over its replicas.

    A gradient that is a sum over the mesh as well is reduced there first, once a batch, and is whole until then. A
    weight that several operations read, as a tied one, is stored whole. Weights of a rule that predicts are gathered
    before use at any level, as each replica predicts its parts.

    Args:
        plan: the plan.
        graph: the model's.
        gradients: signatures over the mesh.

    Raises:
        PlanError: as :func:`signatures_of`; or a signature is no split into as many parts as there are replicas.
    """
    found = _matched("states", plan.states, graph, (plan.state_axis,) if plan.replicas > 1 else ())
    for name, signature in found.items():
        _check_signature(graph, name, signature, plan.grid.shards)
    splits = {name: signature for name, signature in found.items() if isinstance(signature, Split)}
    gathers = plan.zero > 2 or plan.predictor != NO_PREDICTOR
    readers = read_once(graph) if gathers else {}
    found_residences = {}
    for name, split in splits.items():
        gradient = split if plan.zero > 1 and gradients.get(name) != P else B
        found_residences[name] = Residence(split, gradient)
        if reader := readers.get(name):
            cast = dtype_gathered(plan.precision, reader, graph.parameters[name])
            found_residences[name] = Residence(split, gradient, split, cast)
    return found_residences


def read_once(graph: Graph) -> dict[str, Op]:
    """The operation that reads a parameter, where there is one alone."""
    counts = Counter(name for op in graph.ops for name in op.parameters)
    return {name: op for op in graph.ops for name in op.parameters if counts[name] == 1}


def _matched(title: str, patterns: Mapping[str, Lay], graph: Graph, axes: tuple[str, ...]) -> dict[str, Signature]:
    """The signature of each parameter that a table of a plan names."""
    found: dict[str, Signature] = {}
    for pattern in sorted(patterns, key=len):  # a longer one replaces what a shorter one has said
        names = _named(title, pattern, list(graph.parameters), "parameter")
        for signature in _given(title, patterns, pattern, axes):
            found |= dict.fromkeys(names, signature)
    return found


def _named(title: str, pattern: str, every: Sequence[str], kind: str) -> list[str]:
    names = [name for name in every if name == pattern or fnmatchcase(name, pattern)]
    if not names:
        raise PlanError(
            f"{title} of the plan: {pattern!r}",
            got=f"no {kind} of this name or pattern",
            expected=f"one of the model's, such as {', '.join(every[:3])}",
            remedy="Correct the plan.",
        )
    return names


def _given(title: str, patterns: Mapping[str, Lay], pattern: str, axes: tuple[str, ...]) -> list[Signature]:
    """The signatures that a pattern gives."""
    named = [axis for axis, _ in patterns[pattern]]
    if len(set(named)) < len(named) or not set(named) <= set(axes):
        raise PlanError(
            f"{title} of the plan: {pattern!r}",
            got="the axes " + ", ".join(named),
            expected="each at most once, of the mesh: " + (", ".join(axes) or "none"),
            remedy="Correct the plan.",
        )
    return [signature for _, signature in patterns[pattern]]


def _check_signature(graph: Graph, name: str, signature: Signature, parts: int) -> None:
    parameter = graph.parameters[name]
    fits = signature == B
    if isinstance(signature, Split) and signature.dim < len(parameter.shape):
        size = parameter.shape[signature.dim]
        fits = signature.fits(size) and signature.count(size) >= parts
    if not fits:
        raise PlanError(
            f"the signature of parameter {name!r}",
            got=f"{signature} over {parts} workers",
            expected=f"B, or a split of one of its dimensions, of sizes {parameter.shape}, into {parts} parts or more",
            remedy="Correct [parameters] or [states] of the plan.",
        )
