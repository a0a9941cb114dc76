"""Say of each matrix of weights that every worker of a mesh has whole why that is so, for each way to split it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from roundelay.lower.megatron import Found, columns_stop, found_on
from roundelay.lower.split_paths import Paths, Stop, is_table
from roundelay.planner.mesh_signatures import MeshFacts, as_pattern, shapes_of


def left_whole(facts: MeshFacts, split: Collection[str], parts: int) -> dict[str, str]:
    """Why parameters of two dimensions or more are whole, by name.

    Args:
        facts: of the model.
        split: names of the parameters that are split.
        parts: workers of the mesh.
    """
    shapes = shapes_of(facts)
    paths = Paths.of(facts.ops, shapes)
    found = found_on(paths, shapes, parts)
    whole = {n: place for n, place in facts.places.items() if n not in split and len(shapes[place]) > 1}
    return {
        name: "; ".join(f"{way}{_in_words(facts, stop)}" for way, stop in _stops(paths, found, place, parts))
        or "no operation reads it"
        if place not in found.signatures
        else f"the plan's `parameters` do not say {found.signatures[place]}, as --tensor-parallel does"
        for name, place in whole.items()
    }


def _stops(paths: Paths, found: Found, place: str, parts: int) -> Iterator[tuple[str, Stop]]:
    """What is in the way of each split of a parameter, by its first reader that is no view."""
    made = [value for value, of in paths.made_of.items() if of == place]
    readers = [paths.ops[reader] for value in made for reader in paths.readers.get(value, ()) if reader not in made]
    for op in readers[:1]:
        product = paths.product_of(op)
        is_factor = product is not None and paths.made_of[product[1]] == place
        if is_factor or any(is_table(op.form, value) for value in made if value in op.form.args):
            yield "by columns: ", columns_stop(paths, op, found, parts)
            rows = Stop("{op} looks them up: only those of a table in the shape of split classes are split", op.name)
            yield "by rows: ", found.stops[place] if is_factor else rows
        elif op.form.known:
            yield "", Stop("{op} reads it, which is no product of a value with a matrix", op.name)
        else:
            yield "", Stop("no signature of {op} splits it", op.name)


def _in_words(facts: MeshFacts, stop: Stop) -> str:
    op = facts.graph.ops[facts.graph.index(stop.op)]
    return stop.why.format(op=f"{op.target}{f' in {op.module}' if op.module else ''}")


def by_pattern(reasons: dict[str, str]) -> dict[str, str]:
    """The same with one entry for all whose names and reasons differ in numbers of modules alone."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in reasons.items():
        alike.setdefault((as_pattern(name), as_pattern(why)), []).append(name)
    return {
        pattern if len(names) > 1 else names[0]: why if len(names) > 1 else reasons[names[0]]
        for (pattern, why), names in alike.items()
    }
