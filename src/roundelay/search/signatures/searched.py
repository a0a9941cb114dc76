"""The best signatures of a model on a mesh of several axes, exactly, and what they cost.

The space: every operation in any of its rows over each axis, split into equal parts; values boxed between them; weights
in parts, and results computed again, where there is a limit on memory. In it nothing takes fewer seconds than
:attr:`SearchedSignatures.bound_s`. On a large mesh of powers of two axes are cut as the operations want it: how many
workers split what gives the bound (:mod:`roundelay.search.signatures.quotient`), and axes for them the plan
(:mod:`roundelay.search.signatures.lifted`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph, Profile
from roundelay.ir.layout import Lay
from roundelay.ir.num_bytes import bytes_text
from roundelay.ir.sbp import Split
from roundelay.lower.boxing import Step
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.planner.cost_model import roofline
from roundelay.planner.mesh_signatures import MeshFacts, with_patterns
from roundelay.search.signatures.boxing_prices import BoxingPrices, Link
from roundelay.search.signatures.lifted import lifted
from roundelay.search.signatures.problem import BOXING, Machine, Problem, problem
from roundelay.search.signatures.quotient import bits_of
from roundelay.search.signatures.tables import Solution, solve
from roundelay.search.signatures.ways import splits, state

MOST_AXES, MOST_WORKERS = 3, 4
"""Of a mesh, and along one of its axes: beyond, axes are cut."""

WHERE = (
    "axes cut as operations want it",
    "axes cut as operations want it, and tensors divided among all workers between operations",
)
"""The space over bits in words, and where between operations nothing is held twice."""


class PricedBoxing(NamedTuple):
    """A value's boxing, forward and of its gradient, for a reader: itself where several read it. Seconds of a batch."""

    value: str
    reader: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchedSignatures:
    """What was found.

    Args:
        seconds: of a batch.
        bound_s: that no choice of the space undercuts.
        memory: bytes of a worker.
        space: how many choices there are.
        terms: of the seconds, the most first.
        parameters: lays of parameters, by name.
        values: of results, by name.
        boxings: that move something.
        levels: of ZeRO, by parameter.
        again: operations whose results are computed again for the backward.
        mesh: workers along the axes of the lays; those that were given, or parts of them.
        where: the space in words.
        not_runnable: why the runtime cannot run it yet; empty where it can.
    """

    seconds: float
    bound_s: float
    memory: float
    space: int
    terms: Mapping[str, float] = field(hash=False)
    parameters: Mapping[str, Lay] = field(hash=False)
    values: Mapping[str, Lay] = field(hash=False)
    boxings: tuple[PricedBoxing, ...]
    levels: Mapping[str, int] = field(hash=False)
    again: tuple[str, ...]
    mesh: Mapping[str, int] = field(hash=False)
    where: str
    not_runnable: str

    @property
    def gap(self) -> float:
        """By how much of its seconds at most it is not the best; 0: it is the best."""
        return (self.seconds - self.bound_s) / self.seconds if self.seconds else 0.0


def signatures_on(
    facts: MeshFacts,
    mesh: Mapping[str, int],
    links: Mapping[str, Link],
    profile: Profile | None = None,
    *,
    micro_batches: int = 1,
    memory: int | None = None,
    tied: bool = True,
) -> SearchedSignatures:
    """The signatures of the fewest seconds for a batch.

    Args:
        facts: of the model.
        mesh: workers along each axis, by its name.
        links: between them, by the same names.
        profile: seconds of operations on a whole micro-batch; by default those of the roofline model.
        micro_batches: of a batch.
        memory: bytes that a worker may hold; None for any number.
        tied: whether repeated modules are computed alike.

    Raises:
        PlanError: an axis has no link or fewer than two workers, nothing fits into the memory, or so many operations
            read each other's results that the search would not end.
    """
    for axis, size in mesh.items():
        if size < 2 or axis not in links:
            raise PlanError(
                f"axis {axis!r} of the mesh",
                got=f"{size} workers, {'a link' if axis in links else 'no link'}",
                expected="two workers or more, and a link between them",
                remedy="Correct the mesh.",
            )
    parts, known = sample_micro_batches(facts.graph, micro_batches), profile or roofline(facts.graph, micro_batches)
    machine = Machine(mesh, links, known, micro_batches, parts=parts)
    large = len(mesh) > MOST_AXES or max(mesh.values(), default=1) > MOST_WORKERS
    over_any = large and all(size & (size - 1) == 0 for size in mesh.values())
    found = [over_bits(facts, machine, memory, tied=tied)] if over_any else []
    if not over_any or len(mesh) <= MOST_AXES:
        made = problem(facts, machine, tied=tied, variants=memory is not None)
        found.append(told(facts, machine, made, solve(made.tables, memory)))
    return replace(
        min(found, key=lambda one: one.seconds),
        bound_s=min(one.bound_s for one in found),
        space=sum(one.space for one in found),
        where="; or ".join(one.where for one in found),
    )


def over_bits(
    facts: MeshFacts, machine: Machine, memory: int | None = None, *, tied: bool = True
) -> SearchedSignatures:
    """The same on a mesh of powers of two, with axes of any workers that have equal links.

    Args:
        facts: of the model.
        machine: where; its mesh says how many workers have which links.
        memory: bytes that a worker may hold; None for any number.
        tied: whether repeated modules are computed alike.

    Raises:
        PlanError: as :func:`signatures_on`.
    """
    bits, links = bits_of(machine.mesh, machine.links)
    on_bits = replace(machine, mesh=bits.mesh, links={axis: links[name] for axis, (name, _) in bits.axes.items()})
    bounds = problem(facts, on_bits, bits, tied=tied, variants=memory is not None)
    bound = solve(bounds.tables, memory)
    axes = lifted(bits, bounds, bound)
    on_axes = replace(machine, mesh=axes.mesh, links={axis: links[name] for axis, (name, _) in axes.axes.items()})
    made = problem(facts, on_axes, axes, tied=tied, variants=memory is not None)
    found = told(facts, on_axes, made, solve(made.tables, memory), WHERE[bits.full])
    return replace(found, bound_s=min(bound.bound_s, found.seconds), space=bounds.tables.space)


def told(
    facts: MeshFacts, machine: Machine, made: Problem, solution: Solution, where: str = "whole axes"
) -> SearchedSignatures:
    """A solution over axes, found in a space, in the words of the model."""
    names = {place: name for name, place in facts.places.items()}
    parameters, values, levels, again = dict[str, Lay](), dict[str, Lay](), dict[str, int](), list[str]()
    terms: dict[str, float] = {}
    for variable, (value, variant) in zip(made.variables, solution.choice, strict=True):
        for term, table in variable.terms.items():
            terms[term] = terms.get(term, 0.0) + float(table[value, variant])
        level, repeats = variable.variants[variant]
        for cluster in variable.clusters:
            for op, way in zip(cluster.ops, cluster.ways[value], strict=True):
                read = [(names[place], dims) for place, dims in op.form.args.items() if place in names]
                parameters |= {name: splits(dims, way, machine.mesh, together=True) for name, dims in read}
                levels |= {name: level for name, _ in read}
                for port, (name, _) in enumerate(op.ports[len(op.form.args) :], len(op.form.args)):
                    values[name] = state(op, way, port, machine.mesh).value
                again += [op.name] if repeats and op.name in made.repeatable else []
        if variable.weight:
            parameters[names[variable.weight]] = variable.states[value].value
            levels[names[variable.weight]] = level
    boxings = tuple(_boxings(machine, made, solution))
    terms[BOXING] = sum(boxing.seconds for boxing in boxings)
    return SearchedSignatures(
        seconds=solution.seconds,
        bound_s=solution.bound_s,
        memory=solution.memory,
        space=made.tables.space,
        terms=dict(sorted(terms.items(), key=lambda pair: -pair[1])),
        parameters=parameters,
        values=values,
        boxings=boxings,
        levels=levels,
        again=tuple(again),
        mesh=machine.mesh,
        where=where,
        not_runnable=_not_runnable(machine, facts.graph, parameters, values),
    )


def _boxings(machine: Machine, made: Problem, solution: Solution) -> Iterator[PricedBoxing]:
    for edge in made.edges:
        source, target = (own[solution.choice[end][0]] for own, end in zip(edge.states, edge.ends, strict=True))
        prices = cast("BoxingPrices", made.prices[edge.value])
        forward, backward = prices.way(source.value, target.value), prices.way(target.gradient, source.gradient)
        if any(step.phases for step in (*forward, *backward)):
            seconds = machine.micro_batches * float(prices.of_states([source], [target])[0, 0])
            yield PricedBoxing(edge.value, edge.reader, forward, backward, seconds)


def _not_runnable(machine: Machine, graph: Graph, parameters: Mapping[str, Lay], values: Mapping[str, Lay]) -> str:
    """Replicas have whole parameters and rows of the results; beside them the runtime has one axis."""
    split = {axis for lay in parameters.values() for axis, _ in lay}
    used = split.union(*[{axis for axis, _ in lay} for lay in values.values()])
    rows = [{axis for axis, own in values[name] if own == Split(0)} for name in graph.outputs if name in values]
    others = [axis for axis in machine.mesh if axis in used and (axis in split or not all(axis in own for own in rows))]
    if len(others) < 2:
        return ""
    return f"not runnable here: signatures over {', '.join(others)}, and the runtime has one axis beside the replicas"


def table(found: SearchedSignatures, graph: Graph) -> str:
    """What was found as text: seconds with their terms, and signatures by module, with ``*`` in place of numbers."""
    last = {op.module: op.name for op in graph.ops if op.module and op.name in found.values}
    results = {module: found.values[name] for module, name in last.items()}
    head = [
        f"{found.seconds * 1e3:.3f} ms a batch, {bytes_text(round(found.memory))} a worker",
        f"the best found of {_count(found.space)} choices; gap {found.gap:.2%}",
        f"of {found.where}; here {' x '.join(f'{axis} {size}' for axis, size in found.mesh.items())}",
        ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in found.terms.items() if seconds),
    ]
    rows = [("parameter", "signatures"), *_rows(found.parameters), ("result of", "signatures"), *_rows(results)]
    width = max(len(name) for name, _ in rows)
    return "\n".join([*head, *filter(None, [found.not_runnable]), *[f"{name:<{width}}  {lay}" for name, lay in rows]])


def _rows(lays: Mapping[str, Lay]) -> list[tuple[str, str]]:
    """By pattern, in which ``*`` stands for a number alone."""
    depths = sorted({name.count(".") for name in lays})
    alike = [
        with_patterns(
            {n: lay for n, lay in lays.items() if n.count(".") == depth}, [n for n in lays if n.count(".") == depth]
        )
        for depth in depths
    ]
    return [
        (name, " ".join(f"{axis}:{own}" for axis, own in lay) or "B") for each in alike for name, lay in each.items()
    ]


def _count(number: int) -> str:
    return str(number) if number < 10**6 else f"10^{len(str(number)) - 1}"
