"""Find the signatures of weights that Megatron-LM gives to transformers, in any graph (Megatron-LM, Sect. 3).

A product's summed dimension is split where that can be followed back, through operations that split alike, to the
columns of other products: linear, activation, linear, and attention. Of the last product, whose results are the scores
of a cross entropy in the graph, the classes are split, and with them the rows of embedding tables of its shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roundelay.ir.deduction import Row, ShardedOp
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import Signature, Split
from roundelay.lower.op_rows import Coarser, split_row

LEAST_CLASSES = 1024
"""With fewer classes, what is computed of a split cross entropy costs less than its exchanges."""


def megatron(ops: Sequence[ShardedOp], parameters: Mapping[str, Sequence[int]], workers: int) -> dict[str, Signature]:
    """Signatures of weights that split pairs of matrix products with what is between them, and large vocabularies.

    Args:
        ops: in order.
        parameters: their shapes, by name.
        workers: p; nothing is split into fewer parts.
    """
    by_name = {op.name: op for op in ops}
    readers: dict[str, list[str]] = {}
    for op in ops:
        for name in {*op.form.args, *([op.takes[0]] if op.takes else [])} if op.form.results else ():
            readers.setdefault(name, []).append(op.name)
    found: dict[str, Signature] = {}
    for op in ops:
        found |= _classes(by_name, parameters, readers, op, workers)
    found |= _tables(ops, parameters, {tuple(parameters[name]) for name in found})
    for op in ops:
        pair = _product_of(op, parameters)
        if pair is None or pair[1] in found:
            continue
        x, weight = pair
        size = _summed_size(op.form, x)
        seeds = _followed(by_name, parameters, readers, (op, x, weight), size, workers)
        if seeds and not seeds.keys() & found.keys():
            found |= seeds
    return found


def _classes(
    by_name: Mapping[str, ShardedOp],
    parameters: Mapping[str, Sequence[int]],
    readers: Mapping[str, Sequence[str]],
    op: ShardedOp,
    workers: int,
) -> dict[str, Signature]:
    """Signatures of the weights of the product that makes a cross entropy's scores; empty if others read them."""
    if op.form.over is None:
        return {}
    x, dim = op.form.over
    size = op.form.args[x][dim][-1][1]
    is_loss = all(len(dims) < len(op.form.args[x]) for dims in op.form.results)
    if not is_loss or not isinstance(size, int) or size < max(LEAST_CLASSES, workers):
        return {}
    seeds: dict[str, Signature] = {}
    region: dict[str, str] = {x: ""}
    found = _back(by_name, parameters, x, Split(dim), seeds, region) is True
    return seeds if found and _is_closed(op, region, readers) else {}


def _is_closed(op: ShardedOp, region: Mapping[str, str], readers: Mapping[str, Sequence[str]]) -> bool:
    """Whether nothing but an operation and those before it in a region reads the region's values."""
    inside = {op.name, *region.values()}
    return all(reader in inside for value in region for reader in readers.get(value, ()))


def _tables(
    ops: Sequence[ShardedOp], parameters: Mapping[str, Sequence[int]], shapes: set[tuple[int, ...]]
) -> dict[str, Signature]:
    """The rows of tables of these shapes in which something is looked up."""
    return {
        name: Split(0)
        for op in ops
        for name in op.form.args.keys() & parameters.keys()
        if tuple(parameters[name]) in shapes and _is_table(op.form, name)
    }


def _is_table(form: OpForm, name: str) -> bool:
    """Whether an argument's rows are found only in it: nothing is multiplied with them, and no result has them."""
    (rows, _), *_ = form.args[name][0]
    others = [dims for other, dims in form.args.items() if other != name]
    labels = {label for dims in (*others, *form.results) for factors in dims for label, _ in factors}
    return rows is not None and rows not in labels


def _product_of(op: ShardedOp, parameters: Mapping[str, Sequence[int]]) -> tuple[str, str] | None:
    """The factors of a product with a weight: the one that is no parameter, and the weight."""
    for group in op.form.linear:
        for weight in group & parameters.keys():
            others = [n for n in op.form.args if n not in parameters and n not in group]
            if len(parameters[weight]) == 2 and len(others) == 1 and _contracts(op.form, weight):
                return others[0], weight
    return None


def _contracts(form: OpForm, weight: str) -> bool:
    labels = {label for factors in form.args[weight] for label, _ in factors if label is not None}
    kept = {label for dims in form.results for factors in dims for label, _ in factors}
    return len(labels) == 2 and len(labels - kept) == 1 and not _is_table(form, weight)


def _summed_size(form: OpForm, x: str) -> int:
    return int(form.args[x][-1][-1][1])


def _followed(
    by_name: Mapping[str, ShardedOp],
    parameters: Mapping[str, Sequence[int]],
    readers: Mapping[str, Sequence[str]],
    product: tuple[ShardedOp, str, str],
    size: int,
    workers: int,
) -> dict[str, Signature]:
    """Signatures of the weights of a pair. The unit grows as it must.

    Empty if the split cannot be followed back, or if what is split on the way is also read by something else.
    """
    op, x, weight = product
    dim, unit = len(op.form.args[x]) - 1, 1
    while size // unit >= workers:
        seeds: dict[str, Signature] = {}
        row = split_row(op.form, x, Split(dim, 1, unit))
        if not isinstance(row, Row):
            return {}
        seeds[weight] = row.args[weight]
        region: dict[str, str] = {x: ""}
        step = _back(by_name, parameters, x, Split(dim, 1, unit), seeds, region)
        if step is True:
            return seeds if len(seeds) > 1 and _is_closed(op, region, readers) else {}
        if step is False:
            return {}
        unit *= step
    return {}


def _back(
    by_name: Mapping[str, ShardedOp],
    parameters: Mapping[str, Sequence[int]],
    value: str,
    split: Split,
    seeds: dict[str, Signature],
    region: dict[str, str],
) -> bool | int:
    """Follow a split back to columns of weights. False if it leads elsewhere; a number if the unit must be larger.

    Every value on the way is noted in ``region`` with the operation that makes it.
    """
    if region.get(value):
        return True
    op, number = by_name.get(value), 0
    if op is not None and op.takes is not None:
        region[value] = op.name
        value, number = op.takes
        op = by_name.get(value)
    if op is None:
        return False
    region[value] = op.name
    row = split_row(op.form, number, split)
    if isinstance(row, Coarser):
        return row.times
    if row is None:
        return False
    product = _product_of(op, parameters)
    for name, wanted in row.args.items():
        if not isinstance(wanted, Split):
            continue
        if name in parameters:
            if seeds.setdefault(name, wanted) != wanted:
                return False
        elif product is None:
            step = _back(by_name, parameters, name, wanted, seeds, region)
            if step is not True:
                return step
        else:
            return False  # the rows of a product are split, not its columns
    return product is not None or any(isinstance(own, Split) for own in row.args.values())
