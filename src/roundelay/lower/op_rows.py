"""The legal signatures of an operation over one mesh axis: one row for each way to compute it on local tensors.

A row says the signature of every tensor that the operation reads and of each result (OneFlow, Table 1). All rows follow
from the operation's form: everything broadcast; a label split, wherever it occurs; linear arguments partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roundelay.ir.deduction import Row
from roundelay.ir.op_form import Dims, OpForm
from roundelay.ir.sbp import B, P, Partial, Signature, Split


@dataclass(frozen=True, slots=True)
class Coarser:
    """Why no row has a split: it runs across factors. With ``times`` as many numbers that stay together it may."""

    times: int


def broadcast_row(form: OpForm) -> Row:
    """Every worker computes all of it."""
    return Row("broadcast", dict.fromkeys(form.args, B), (B,) * len(form.results))


def partial_rows(form: OpForm) -> Iterator[Row]:
    """For each group of linear arguments, the row in which they are partial."""
    for group in form.linear:
        args = {name: P if name in group else B for name in form.args}
        yield Row("partial", args, (P,) * len(form.results))


def split_row(form: OpForm, place: str | int, split: Split) -> Row | Coarser | None:
    """The row in which an argument, by name, or a result, by number, is split so; None if there is none."""
    dims = form.args[place] if isinstance(place, str) else form.results[place]
    found = _within(dims, split)
    if not isinstance(found, tuple):
        return found
    label, outer, unit = found
    args: dict[str, Signature] = {}
    labelled = {name for name, own in form.args.items() if _place(own, label)}
    reduced = Partial(form.reduction)
    results = tuple([_signature(own, label, outer, unit, reduced) for own in form.results])
    summed = P in results
    if reduced in results and len(set(results)) > 1:
        return None
    for name, own in form.args.items():
        args[name] = _signature(own, label, outer, unit, reduced) if name in labelled else B
        added = any(name in group and group & labelled for group in form.linear)
        if summed and name not in labelled and added:  # or it would be added once by every worker
            args[name] = P
    if not all(_is_known(own) for own in (*args.values(), *results)):
        return None
    return Row("split", args, results)


def _is_known(signature: Signature) -> bool:
    """Whether it says as numbers how a dimension is read: blocks of the batch's size it cannot tell."""
    return not isinstance(signature, Split) or isinstance(signature.outer * signature.unit, int)


def _within(dims: Dims, split: Split) -> tuple[int, int, int] | Coarser | None:
    """The label in which a split lies, with its blocks and unit inside of it."""
    factors = dims[split.dim]
    sizes = [size for _, size in factors]
    if not all(isinstance(size, int) for size in sizes):
        plain = len(factors) == 1 and split.outer == split.unit == 1
        return (factors[0][0], 1, 1) if plain and factors[0][0] is not None else None
    for i, (label, size) in enumerate(factors):
        left, right = _product(sizes[:i]), _product(sizes[i + 1 :])
        if split.outer % left or (left * size) % split.outer:
            continue
        outer = split.outer // left
        if split.unit % right == 0 and size % (outer * (split.unit // right)) == 0:
            return (label, outer, split.unit // right) if label is not None else None
        if right > split.unit and right % split.unit == 0 and size % outer == 0 and size > outer:
            return Coarser(right // split.unit)
    return None


def _place(dims: Dims, label: int) -> tuple[int, int] | None:
    """Dimension and number of the factor with a label."""
    for d, factors in enumerate(dims):
        for i, (own, _) in enumerate(factors):
            if own == label:
                return d, i
    return None


def _signature(dims: Dims, label: int, outer: int, unit: int, reduced: Partial) -> Signature:
    """The signature of a tensor when a label is split: ``reduced`` for a result that lacks it."""
    place = _place(dims, label)
    if place is None:
        return reduced
    d, i = place
    sizes = [size for _, size in dims[d]]
    return Split(d, _product(sizes[:i]) * outer, unit * _product(sizes[i + 1 :]))


def _product(sizes: list[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total
