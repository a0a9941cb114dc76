"""Deduce the signatures of a whole graph over one mesh axis (OneFlow, Sect. 3.2), forward and backward.

Forward, operation by operation: of the rows that are near what its tensors have already, the cheapest, by the bytes
that boxings move and by what is computed. Backward, in the reverse order: the gradient of a split tensor is split, that
of a partial one broadcast; a broadcast one's is partial as soon as one consumer contributes only a part, and then stays
so through all that every worker computes alike, up to the boxing before it, where it is reduced. So a transformer layer
has two reductions forward and two backward (Megatron-LM, Sect. 3), and small parameters are reduced at the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from roundelay.ir.deduction import Box, Deduction, Row, ShardedOp, Use
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import B, P, Signature, Split
from roundelay.lower.op_rows import Coarser, broadcast_row, partial_rows, split_row

FLOPS_PER_BYTE = 25.0
"""What a worker computes while a byte is moved, for a choice between the two: a core of a CPU and shared memory."""


def is_local(source: Signature, target: Signature) -> bool:
    """Whether a worker makes the one from the other alone: a slice, a mask, zeros around a part."""
    return source in (target, B) or target == P


def moved(source: Signature, target: Signature, num_bytes: float, workers: int) -> float:
    """Bytes that one worker sends in a boxing of a tensor (OneFlow, Table 2, divided by p)."""
    if is_local(source, target):
        return 0.0
    share = (workers - 1) / workers * num_bytes
    if source == P:
        return share if isinstance(target, Split) else 2 * share
    return share / workers if isinstance(target, Split) else share


def deduce(
    ops: Sequence[ShardedOp],
    given: Mapping[str, Signature],
    sizes: Mapping[str, float],
    workers: int,
    needed: Mapping[str, Signature],
    weights: Mapping[str, float],
) -> Deduction:
    """Deduce every signature.

    Args:
        ops: in order.
        given: signatures of parameters and inputs; broadcast where nothing is said.
        sizes: bytes of every value on a micro-batch, by name.
        workers: p.
        needed: signatures that the graph's results must have.
        weights: bytes of every trained parameter, by name.
    """
    values, rows = _forward(ops, given, sizes, workers)
    return _backward(ops, values, rows, needed, sizes, weights)


def _forward(
    ops: Sequence[ShardedOp], given: Mapping[str, Signature], sizes: Mapping[str, float], workers: int
) -> tuple[dict[str, Signature], dict[str, Row]]:
    values: dict[str, Signature] = dict(given)
    rows: dict[str, Row] = {}
    boxed: dict[str, list[Signature]] = {}  # what a value has been boxed to for an earlier consumer
    price = {**sizes, **dict.fromkeys(given, math.inf)}  # what a worker holds of a parameter is not moved
    for op in ops:
        if op.takes is not None:
            source, number = op.takes
            rows[op.name] = Row("broadcast", {}, ())
            values[op.name] = rows[source].results[number] if rows[source].results else B
            continue
        have = {name: [values.get(name, B), *boxed.get(name, ())] for name in op.form.args}

        def cost(row: Row, op: ShardedOp = op, have: Mapping[str, Sequence[Signature]] = have) -> tuple[float, str]:
            bytes_moved = sum(
                min(moved(own, row.args[name], price.get(name, 0.0), workers) for own in owned)
                for name, owned in have.items()
            )
            shared = op.flops / FLOPS_PER_BYTE / (1 if row.kind == "broadcast" else workers)
            return 2 * bytes_moved + shared, _PREFERRED[row.kind]

        row = min(_candidates(op.form, have), key=cost)
        rows[op.name] = row
        for name, owned in have.items():
            if row.args[name] not in owned and not is_local(owned[0], row.args[name]):
                boxed.setdefault(name, []).append(row.args[name])
        if row.results:
            values[op.name] = row.results[0]
    return values, rows


_PREFERRED = {"split": "0", "broadcast": "1", "partial": "2"}
"""Among rows of equal cost: what is partial will have to be reduced."""


def _candidates(form: OpForm, have: Mapping[str, Sequence[Signature]]) -> Iterator[Row]:
    """Rows in which something stays as it is."""
    for name, owned in have.items():
        for own in owned:
            row = split_row(form, name, own) if isinstance(own, Split) else None
            if isinstance(row, Row):
                yield row
    for row in partial_rows(form):
        if any(P in have[name] and own == P for name, own in row.args.items()):
            yield row
    yield broadcast_row(form)


class _Reading(NamedTuple):
    """That an operation, or the graph's end, reads a value."""

    op: str
    wanted: Signature
    given: Signature | None


def _backward(
    ops: Sequence[ShardedOp],
    values: Mapping[str, Signature],
    rows: Mapping[str, Row],
    needed: Mapping[str, Signature],
    sizes: Mapping[str, float],
    weights: Mapping[str, float],
) -> Deduction:
    settled = _Settled(values)
    for name, wanted in needed.items():
        settled.readings.setdefault(name, []).append(_Reading("", wanted, wanted))
    made = {op.name for op in ops}
    several: dict[str, list[Signature]] = {}  # gradients of an operation's several results
    for op in reversed(ops):
        gradient = settled.settle(op.name, op.differentiable, _reduces(op, values, sizes, weights))
        if op.takes is not None:
            several.setdefault(op.takes[0], []).extend([] if gradient is None else [gradient])
            continue
        of_results = P if P in several.get(op.name, ()) or gradient == P else B
        differentiable = op.differentiable or bool(several.get(op.name))
        row = rows[op.name]
        for name, wanted in row.args.items():
            given = row.gradient_of(name, of_results) if differentiable else None
            settled.readings.setdefault(name, []).append(_Reading(op.name, wanted, given))
    for name in sorted(settled.readings.keys() - made):
        settled.settle(name, name in weights, False)
    boxes, uses = tuple(settled.boxes), settled.uses
    of_results_uses = {name: use for (op_name, name), use in uses.items() if not op_name}
    return Deduction(rows, values, settled.gradients, boxes, {k: u for k, u in uses.items() if k[0]}, of_results_uses)


def _reduces(
    op: ShardedOp, values: Mapping[str, Signature], sizes: Mapping[str, float], weights: Mapping[str, float]
) -> bool:
    """Whether a partial gradient is reduced at an operation's result rather than for its large parameters."""
    own = sum(weights.get(name, 0.0) for name in op.form.args if values.get(name, B) == B)
    return own > sizes.get(op.name, 0.0)


class _Settled:
    """What is known of values whose consumers are all known."""

    def __init__(self, values: Mapping[str, Signature]) -> None:
        self._values = values
        self.readings: dict[str, list[_Reading]] = {}
        self.gradients: dict[str, Signature] = {}
        self.boxes: list[Box] = []
        self.uses: dict[tuple[str, str], Use] = {}

    def settle(self, name: str, differentiable: bool, reduces: bool) -> Signature | None:
        """Settle a value's gradient, its boxings, and how each consumer reads it."""
        own, readings = self._values.get(name, B), self.readings.get(name, [])
        near = [r for r in readings if is_local(own, r.wanted)]
        gradient: Signature | None = None
        if differentiable:
            gradient = own if isinstance(own, Split) else B
        partial = differentiable and own == B and any(_contributes_part(r) for r in near)
        if partial and reduces:
            box = self._box(name, own, B, P, B)
            for reading in near:
                self._use(reading, name, box, B, P)
        else:
            gradient = P if partial else gradient
            for reading in near:
                self._use(reading, name, name, own, gradient)
        for wanted in dict.fromkeys(r.wanted for r in readings if r not in near):
            group = [r for r in readings if r.wanted == wanted]
            given = _together(group) if differentiable else None
            box = self._box(name, own, wanted, given, gradient)
            for reading in group:
                self._use(reading, name, box, wanted, given)
        if gradient is not None:
            self.gradients[name] = gradient
        return gradient

    def _box(
        self, value: str, source: Signature, target: Signature, given: Signature | None, needed: Signature | None
    ) -> str:
        name = f"{value}_box{sum(box.value == value for box in self.boxes) or ''}"
        self.boxes.append(Box(name, value, source, target, given, needed))
        return name

    def _use(self, reading: _Reading, name: str, value: str, has: Signature, gradient: Signature | None) -> None:
        """A consumer that contributes alike on every worker counts once where the gradient is partial."""
        alike = reading.given == B and reading.wanted in (B, P)
        self.uses[reading.op, name] = Use(value, has, reading.wanted, alike and gradient == P)


def _contributes_part(reading: _Reading) -> bool:
    """Whether a consumer of a broadcast value contributes a part of its gradient: also by reading a part of it."""
    return reading.given == P or (isinstance(reading.wanted, Split) and reading.given is not None)


def _together(group: Sequence[_Reading]) -> Signature | None:
    """The signature of the gradient of a boxed value."""
    given = [reading.given for reading in group if reading.given is not None]
    return (P if P in given else given[0]) if given else None


def megatron(ops: Sequence[ShardedOp], parameters: Mapping[str, Sequence[int]], workers: int) -> dict[str, Signature]:
    """Signatures of weights that split pairs of matrix products with what is between them (Megatron-LM, Sect. 3).

    A product's summed dimension is split where that can be followed back, through operations that split alike, to the
    columns of other products' weights.

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
        pair = _product_of(op, parameters)
        if pair is None or pair[1] in found:
            continue
        x, weight = pair
        size = _summed_size(op.form, x)
        seeds = _followed(by_name, parameters, readers, (op, x, weight), size, workers)
        if seeds and not seeds.keys() & found.keys():
            found |= seeds
    return found


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
    return len(labels) == 2 and len(labels - kept) == 1


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
            inside = {op.name, *region.values()}
            closed = all(reader in inside for value in region for reader in readers.get(value, ()))
            return seeds if len(seeds) > 1 and closed else {}
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
