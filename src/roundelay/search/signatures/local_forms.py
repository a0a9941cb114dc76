"""Forms of operations in numbers, with labels cut so finely that each split of a value is one of whole factors.

An operation reads a dimension of 384 as one factor, the next one as 3 x 128, the one after it as 3 x 4 x 32. Where one
of them cuts a dimension, all cut it: so what one can split the others can read, and two splits are the same if and only
if they are written alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundelay.ir.deduction import ShardedOp
from roundelay.ir.op_form import Dims, Factor, OpForm, number_of
from roundelay.planner.mesh_signatures import MeshFacts


@dataclass(frozen=True, slots=True)
class LocalOp:
    """An operation on the sample micro-batch.

    Args:
        name: its name.
        form: with sizes that are numbers.
        results: names of the values that it produces.
        differentiable: whether a gradient flows back through them.
    """

    name: str
    form: OpForm
    results: tuple[str, ...]
    differentiable: bool

    @property
    def ports(self) -> tuple[tuple[str, Dims], ...]:
        """The tensors that it reads, and behind them those that it produces."""
        return (*self.form.args.items(), *zip(self.results, self.form.results, strict=True))


def local_ops(facts: MeshFacts) -> list[LocalOp]:
    """The operations that compute, in order: one that picks a result of another is the name of this result."""
    picked = {op.takes: op.name for op in facts.ops if op.takes is not None}
    shapes = {name: value.shape for name, value in facts.graph.values.items() if value.kind == "tensor"}
    shapes |= {place: facts.graph.parameters[name].shape for name, place in facts.places.items()}
    with_gradient = {name for name, value in facts.graph.values.items() if value.requires_grad}
    found = []
    for op in facts.ops:
        if op.takes is None:
            several = any((op.name, i) in picked for i in range(len(op.form.results)))
            names = [picked.get((op.name, i), f"{op.name}.{i}") for i in range(len(op.form.results))]
            results = tuple(names if several else [op.name] * len(names))
            found.append(LocalOp(op.name, _in_numbers(op, results, shapes), results, bool(with_gradient & {*results})))
    cuts = _all_cuts(found)
    return [replace(op, form=_cut(op, cuts)) for op in found]


def _mapped(form: OpForm, change: Callable[[Factor], Iterable[Factor]]) -> OpForm:
    """A form with other factors."""

    def of(dims: Dims) -> Dims:
        return tuple([tuple([own for factor in factors for own in change(factor)]) for factors in dims])

    return replace(form, args={n: of(dims) for n, dims in form.args.items()}, results=tuple(map(of, form.results)))


def _in_numbers(op: ShardedOp, results: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> OpForm:
    """The form with the sizes of the sample; a label of which nobody knows one is none."""
    sizes: dict[int | None, int] = {}
    for name, dims in (*op.form.args.items(), *zip(results, op.form.results, strict=True)):
        for factors, size in zip(dims, shapes.get(name, ()), strict=False):
            known = math.prod(number_of(own) or 1 for _, own in factors)
            sizes |= {label: size // known for label, own in factors if label is not None and not number_of(own)}

    def in_numbers(factor: tuple[int | None, Any]) -> Iterable[Factor]:
        label, size = factor[0], number_of(factor[1]) or sizes.get(factor[0], 0)
        yield label if size else None, size or 1

    return _mapped(op.form, in_numbers)


Cuts = dict[tuple[str, int], set[int]]
"""Into how many parts a dimension of a value is cut, or a label of an operation, by name and number."""


def _all_cuts(ops: Sequence[LocalOp]) -> Cuts:
    """Where labels are cut: every cut goes on to all that read or produce a value."""
    of_values: Cuts = defaultdict(set)
    of_labels: Cuts = defaultdict(set)
    before = -1
    while before != (before := sum(map(len, (*of_values.values(), *of_labels.values())))):
        for op in (*ops, *reversed(ops)):
            for name, dims in op.ports:
                for dim, factors in enumerate(dims):
                    _exchange_cuts(of_values[name, dim], of_labels, op.name, factors)
    return of_labels


def _exchange_cuts(own: set[int], of_labels: Cuts, op: str, factors: Sequence[Factor]) -> None:
    left = 1
    for label, size in factors:
        _add(own, left)
        if label is not None:
            mine = of_labels[op, label]
            for cut in sorted(mine):
                _add(own, left * cut)
            for cut in sorted(own):
                if left < cut < left * size and cut % left == 0 and size % (cut // left) == 0:
                    _add(mine, cut // left)
        left *= size


def _add(cuts: set[int], cut: int) -> None:
    """Add a cut, unless it lies across another one."""
    if cut > 1 and all(cut % other == 0 or other % cut == 0 for other in cuts):
        cuts.add(cut)


def _cut(op: LocalOp, cuts: Cuts) -> OpForm:
    """The form with each label cut in several, all of them numbered anew."""
    numbers: dict[tuple[int, int], int] = {}

    def finer(factor: Factor) -> Iterable[Factor]:
        label, size = factor
        if label is None:
            yield factor
            return
        edges = [1, *sorted(cuts.get((op.name, label), ())), size]
        for i in range(len(edges) - 1):
            yield numbers.setdefault((label, i), len(numbers)), edges[i + 1] // edges[i]

    return _mapped(op.form, finer)
