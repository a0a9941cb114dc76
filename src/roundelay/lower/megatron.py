"""Find the signatures of weights that Megatron-LM gives to transformers, in any graph (Megatron-LM, Sect. 3).

A product's summed dimension is split where that can be followed back, through operations that split alike, to the
columns of other products: linear, activation, linear, and attention. Of the last product, whose results are the scores
of a cross entropy in the graph, the classes are split, and with them the rows of embedding tables of its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roundelay.errors import counted
from roundelay.ir.deduction import Row, ShardedOp
from roundelay.ir.op_form import OpForm, number_of
from roundelay.ir.sbp import Signature, Split
from roundelay.lower.op_rows import Coarser, split_row
from roundelay.lower.split_paths import Paths, Stop, Walk, is_table

LEAST_CLASSES = 1024
"""With fewer classes, what is computed of a split cross entropy costs less than its exchanges."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is split, and why other products are not.

    Args:
        signatures: of weights.
        stops: why a product's summed dimension is whole, by its weight.
    """

    signatures: Mapping[str, Signature]
    stops: Mapping[str, Stop]


def megatron(ops: Sequence[ShardedOp], parameters: Mapping[str, Sequence[int]], workers: int) -> Found:
    """Signatures of weights that split pairs of matrix products with what is between them, and large vocabularies.

    Args:
        ops: in order.
        parameters: their shapes, by name.
        workers: p; nothing is split into fewer parts.
    """
    return found_on(Paths.of(ops, parameters), parameters, workers)


def found_on(paths: Paths, parameters: Mapping[str, Sequence[int]], workers: int) -> Found:
    """The same on the paths of a graph."""
    ops = list(paths.ops.values())
    classes: dict[str, Signature] = {}
    for op in ops:
        classes |= _classes(paths, op, workers)
    classes |= _tables(ops, parameters, {tuple(parameters[name]) for name in classes})
    tried = {op.name: tried for op in ops if (tried := _pair(paths, op, workers)) is not None}
    stops = {name: stop for name, (_, stop) in tried.items() if isinstance(stop, Stop)}
    walks = {name: walk for name, (_, walk) in tried.items() if isinstance(walk, Walk)}
    while True:
        seeds, kept, refused = dict(classes), dict[str, Walk](), dict[str, Stop]()
        for name, walk in walks.items():
            if all(seeds.get(weight, own) == own for weight, own in walk.seeds.items()):
                seeds |= walk.seeds
                kept[name] = walk
            else:
                refused[name] = Stop("what {op} reads is split in another way", name)
        opened = {name: stop for name, walk in kept.items() if (stop := _opening(paths, walk, kept)) is not None}
        if not opened:
            every = stops | refused
            return Found(seeds, {weight: every[name] for name, (weight, _) in tried.items() if name in every})
        stops |= opened
        walks = {name: walk for name, walk in walks.items() if name not in opened}


def _classes(paths: Paths, op: ShardedOp, workers: int) -> Mapping[str, Signature]:
    """Signatures of the weights of the product that makes a cross entropy's scores; empty if others read them."""
    size = scores_of(op.form)
    if op.form.over is None or size < max(LEAST_CLASSES, workers):
        return {}
    x, dim = op.form.over
    walk = Walk({op.name})
    found = paths.back(x, Split(dim), walk) is None
    return walk.seeds if found and _opening(paths, walk, {}) is None else {}


def scores_of(form: OpForm) -> int:
    """How many classes an operation that is a loss has; 0 if it is none, or they vary with the batch."""
    if form.over is None:
        return 0
    x, dim = form.over
    size = form.args[x][dim][-1][1]
    is_loss = all(len(dims) < len(form.args[x]) for dims in form.results)
    return size if is_loss and isinstance(size, int) else 0


def _opening(paths: Paths, walk: Walk, others: Mapping[str, Walk]) -> Stop | None:
    """Where what is split on a walk is read by something that is on no walk that splits it alike."""
    for value, split in walk.values.items():
        for reader in paths.readers.get(value, ()):
            alike = (other for other in others.values() if reader in other.ops and other.values.get(value) == split)
            if reader not in walk.ops and next(alike, None) is None:
                return Stop("{op} also reads what would be split, and needs all of it", reader)
    return None


def _tables(
    ops: Sequence[ShardedOp], parameters: Mapping[str, Sequence[int]], shapes: set[tuple[int, ...]]
) -> dict[str, Signature]:
    """The rows of tables of these shapes in which something is looked up."""
    return {
        name: Split(0)
        for op in ops
        for name in op.form.args.keys() & parameters.keys()
        if tuple(parameters[name]) in shapes and is_table(op.form, name)
    }


def _pair(paths: Paths, op: ShardedOp, workers: int) -> tuple[str, Walk | Stop] | None:
    """The weight of a product, with the walk from its summed dimension back to columns; the unit grows as it must."""
    product = paths.product_of(op)
    if product is None:
        return None
    x, weight = product
    size, unit = number_of(op.form.args[x][-1][-1][1]), 1
    if not size:
        return paths.made_of[weight], Stop("what {op} sums over varies with the batch", op.name)
    while size // unit >= workers:
        step = _followed(paths, op, product, unit)
        if not isinstance(step, Coarser):
            return paths.made_of[weight], step
        unit *= step.times
    return paths.made_of[weight], _few(size, unit, workers, op)


def _few(size: int, unit: int, workers: int, op: ShardedOp) -> Stop:
    what = f"{size // unit} heads or blocks of {unit} numbers" if unit > 1 else counted(size, "number")
    return Stop(f"its {what} at {{op}} cannot be divided among {workers} workers", op.name)


def _followed(paths: Paths, op: ShardedOp, product: tuple[str, str], unit: int) -> Walk | Stop | Coarser:
    x, weight = product
    split = Split(len(op.form.args[x]) - 1, 1, unit)
    row = split_row(op.form, x, split)
    own = row.args[weight] if isinstance(row, Row) else None
    if not isinstance(own, Split):
        return Stop("no signature of {op} splits what it sums over", op.name)
    walk = Walk({op.name})
    for value, wanted in ((weight, own), (x, split)):
        step = paths.back(value, wanted, walk)
        if step is not None:
            return step
    if walk.columns:
        return walk
    return Stop("what {op} sums over is made by no product's columns", op.name)


def columns_stop(paths: Paths, op: ShardedOp, found: Found, workers: int) -> Stop:
    """Why the columns of a product are whole: where what they make is first something that no signature splits."""
    dim, unit = len(op.form.results[0]) - 1, 1
    size = number_of(op.form.results[0][dim][-1][1])
    while size // unit >= workers:
        step = next(_ahead(paths, op.name, Split(dim, 1, unit), found, {op.name}), None)
        if not isinstance(step, Coarser):
            return step or Stop("nothing sums over what {op} makes", op.name)
        unit *= step.times
    return _few(size, unit, workers, op)


def _ahead(paths: Paths, value: str, split: Split, found: Found, seen: set[str]) -> Iterator[Stop | Coarser]:
    for reader in paths.readers.get(value, ()):
        op = paths.ops[reader]
        product, row = paths.product_of(op), split_row(op.form, value, split) if op.takes is None else None
        results = row.results if isinstance(row, Row) else (split,) * (op.takes is not None)
        if isinstance(row, Coarser):
            yield row
        elif 0 < scores_of(op.form) < LEAST_CLASSES:
            few = f"the {scores_of(op.form)} classes of {{op}} are fewer than {LEAST_CLASSES}"
            yield Stop(f"{few}: parts of them would cost more than they save", reader)
        elif not results:
            yield Stop("no signature of {op} splits it", reader)
        elif product is not None and value == product[0] and not isinstance(results[0], Split):
            yield from [found.stops[name] for name in [paths.made_of[product[1]]] if name in found.stops]
        elif reader not in seen and isinstance(results[0], Split):
            seen.add(reader)
            yield from _ahead(paths, reader, results[0], found, seen)
