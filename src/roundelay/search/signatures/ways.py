"""The ways to compute an operation on a mesh: a row of it for each axis, and the order of axes that split one label.

The rows of the first axis are applied to the whole tensors, those of the second to what the first has left of them, and
so on; a label is split only into equal parts. Backward follows from forward: over an axis a value has a pair of
signatures, its own and its gradient's: ``B/B``, ``B/P``, ``P/B`` or ``S/S``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from roundelay.ir.deduction import Row
from roundelay.ir.layout import Lay, canonical
from roundelay.ir.op_form import Dims
from roundelay.ir.sbp import P_MAX, B, P, Signature, Split
from roundelay.lower.op_rows import broadcast_row, partial_rows, split_row
from roundelay.search.signatures.local_forms import LocalOp


class State(NamedTuple):
    """How a value lies, and its gradient, as one that reads the value gives it or one that produces it takes it."""

    value: Lay
    gradient: Lay


class Letter(NamedTuple):
    """What an operation does along one axis: the label that it splits, and the pairs of its tensors."""

    label: int | None
    pairs: tuple[tuple[Signature, Signature], ...]


def letters(op: LocalOp, parameters: frozenset[str]) -> list[Letter]:
    """The rows of an operation over one axis, forward and backward.

    Args:
        op: the operation.
        parameters: names of these: with none but them partial, one worker would compute and the others idle.
    """
    found = [_letter(None, broadcast_row(op.form), own) for own in (B, P)[: 1 + op.differentiable]]
    for row in partial_rows(op.form):
        if any(own == P and name not in parameters for name, own in row.args.items()):
            found.append(_letter(None, row, B))
    for label, (place, split) in _places(op).items():
        row_or_none = split_row(op.form, place, split)
        if isinstance(row_or_none, Row) and not (op.differentiable and P_MAX in row_or_none.results):
            found.append(_letter(label, row_or_none, B))
    return found


def _letter(label: int | None, row: Row, of_results: Signature) -> Letter:
    args = [(own, row.gradient_of(name, of_results)) for name, own in row.args.items()]
    results = [(own, own if isinstance(own, Split) else of_results if own == B else B) for own in row.results]
    return Letter(label, (*args, *results))


def _places(op: LocalOp) -> dict[int, tuple[str | int, Split]]:
    """For each label of more than one part a tensor that has it, and how that is split."""
    found: dict[int, tuple[str | int, Split]] = {}
    places: list[tuple[str | int, Dims]] = [*op.form.args.items(), *enumerate(op.form.results)]
    for place, dims in places:
        for dim, factors in enumerate(dims):
            for i, (label, size) in enumerate(factors):
                if label is not None and size > 1:
                    outer, unit = (math.prod(s for _, s in part) for part in (factors[:i], factors[i + 1 :]))
                    found.setdefault(label, (place, Split(dim, outer, unit)))
    return found


class Way(NamedTuple):
    """One way on a mesh: a letter for each axis, the order of axes that split a label, and parts of its work."""

    letters: Mapping[str, Letter]
    order: Mapping[int, tuple[str, ...]]
    parts: int


def ways(
    op: LocalOp,
    found: Sequence[Letter],
    mesh: Mapping[str, int],
    may: Callable[[Letter, Sequence[str]], bool] = lambda *_: True,
) -> list[Way]:
    """All ways of an operation on a mesh.

    Args:
        op: the operation.
        found: its letters.
        mesh: sizes of the axes.
        may: whether a letter may be that of these axes, among others.
    """
    sizes = {label: size for _, dims in op.ports for factors in dims for label, size in factors}
    every: list[tuple[dict[str, Letter], dict[int, tuple[str, ...]]]] = [({}, {})]
    for axis in mesh:
        every = [
            ({**chosen, axis: letter}, after)
            for chosen, order in every
            for letter in found
            if may(letter, [*[own for own, other in chosen.items() if other == letter], axis])
            for after in _with_axis(order, letter.label, axis)
            if letter.label is None or sizes[letter.label] % _product(mesh, after[letter.label]) == 0
        ]
    return [Way(chosen, order, math.prod(_product(mesh, o) for o in order.values())) for chosen, order in every]


def _product(mesh: Mapping[str, int], axes: Sequence[str]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _with_axis(order: dict[int, tuple[str, ...]], label: int | None, axis: str) -> Iterator[dict[int, tuple[str, ...]]]:
    """All orders in which an axis is put among those that split a label."""
    if label is None:
        yield order
        return
    axes = order.get(label, ())
    for at in range(len(axes) + 1):
        yield {**order, label: (*axes[:at], axis, *axes[at:])}


def splits(dims: Dims, way: Way, mesh: Mapping[str, int], *, together: bool = False) -> Lay:
    """The splits of a tensor.

    A split into equal parts is the same whatever stays together in it, and is written without: so that two that are the
    same are equal.

    Args:
        dims: of the tensor.
        way: of the operation that has it.
        mesh: sizes of the axes.
        together: write what stays together, for operations that cut the dimension there.
    """
    found: list[tuple[str, Signature]] = []
    for dim, factors in enumerate(dims):
        outer, unit = 1, math.prod(size for _, size in factors)
        for label, size in factors:
            axes = way.order.get(-1 if label is None else label, ())
            unit //= size
            found += [(axis, Split(dim, outer, unit if together else 1)) for axis in axes]
            outer *= size // _product(mesh, axes)
    return tuple(found)


def state(op: LocalOp, way: Way, port: int, mesh: Mapping[str, int]) -> State:
    """How a tensor of an operation lies, by its number among those that it reads and produces."""
    divided = splits(op.ports[port][1], way, mesh)
    pairs = [(axis, letter.pairs[port]) for axis, letter in way.letters.items()]
    both = [tuple([(axis, pair[i]) for axis, pair in pairs if pair[i] in (P, P_MAX)]) for i in (0, 1)]
    return State(canonical((*divided, *both[0])), canonical((*divided, *both[1])))
