"""Deduce the signatures of a whole graph over one mesh axis (OneFlow, Sect. 3.2), forward and backward.

Forward, operation by operation: of the rows that are near what its tensors have already, the cheapest, by the bytes
that boxings move and by what is computed. Backward, in the reverse order: the gradient of a split tensor is split, that
of a partial one broadcast; a broadcast one's is partial as soon as one consumer contributes only a part, and then stays
so through all that every worker computes alike, up to the boxing before it, where it is reduced. So a transformer layer
has two reductions forward and two backward (Megatron-LM, Sect. 3), and small parameters are reduced at the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from roundelay.errors import PlanError
from roundelay.ir.deduction import Box, Deduction, Row, ShardedOp, Use, Wanted
from roundelay.ir.op_form import Dims, OpForm
from roundelay.ir.sbp import P_MAX, B, P, Signature, Split
from roundelay.lower.boxing import is_local, route
from roundelay.lower.op_rows import broadcast_row, partial_rows, split_row

FLOPS_PER_BYTE = 25.0
"""What a worker computes while a byte is moved, for a choice between the two: a core of a CPU and shared memory."""


_NOTHING: Mapping[str, Wanted] = MappingProxyType({})


def moved(source: Signature, target: Signature, num_bytes: float, workers: int) -> float:
    """Bytes that one worker sends in a boxing of a tensor (OneFlow, Table 2, divided by p)."""
    if is_local(source, target):
        return 0.0
    if (source == P_MAX and target == P) or _in_one_dimension(source, target):
        return math.inf  # the largest numbers are no part of a sum; and for the other there is no exchange
    return float(route((("", source),), () if target == B else (("", target),), (("", workers),)).share) * num_bytes


def _in_one_dimension(source: Signature, target: Signature) -> bool:
    return isinstance(source, Split) and isinstance(target, Split) and source.dim == target.dim


def deduce(
    ops: Sequence[ShardedOp],
    given: Mapping[str, Signature],
    sizes: Mapping[str, float],
    workers: int,
    needed: Mapping[str, Signature],
    weights: Mapping[str, float],
    wanted: Mapping[str, Wanted] = _NOTHING,
) -> Deduction:
    """Deduce every signature.

    Args:
        ops: in order.
        given: signatures of parameters and inputs; broadcast where nothing is said.
        sizes: bytes of every value on a micro-batch, by name.
        workers: p.
        needed: signatures that the graph's results must have.
        weights: bytes of every trained parameter, by name.
        wanted: signatures of operations' results, by name.

    Raises:
        PlanError: an operation cannot give what is wanted of it.
    """
    values, rows = _forward(ops, given, sizes, workers, wanted)
    return _backward(ops, values, rows, needed, sizes, weights)


def _forward(
    ops: Sequence[ShardedOp],
    given: Mapping[str, Signature],
    sizes: Mapping[str, float],
    workers: int,
    wanted: Mapping[str, Wanted],
) -> tuple[dict[str, Signature], dict[str, Row]]:
    values: dict[str, Signature] = dict(given)
    rows: dict[str, Row] = {}
    boxed: dict[str, list[Signature]] = {}  # what a value has been boxed to for an earlier consumer
    price = {**sizes, **dict.fromkeys(given, math.inf)}  # what a worker holds of a parameter is not moved
    for op in ops:
        if op.takes is not None:
            _refuse_exact(op, wanted.get(op.name), "one of an operation's several results")
            source, number = op.takes
            rows[op.name] = Row("broadcast", {}, ())
            values[op.name] = rows[source].results[number] if rows[source].results else B
            continue
        have = {name: [values.get(name, B), *boxed.get(name, ())] for name in op.form.args}

        row = cheapest_row(op, have, price, workers, wanted.get(op.name))
        rows[op.name] = row
        for name, owned in have.items():
            if row.args[name] not in owned and not is_local(owned[0], row.args[name]):
                boxed.setdefault(name, []).append(row.args[name])
        if row.results:
            values[op.name] = row.results[0]
    return values, rows


def cheapest_row(
    op: ShardedOp,
    have: Mapping[str, Sequence[Signature]],
    price: Mapping[str, float],
    workers: int,
    wanted: Wanted | None = None,
) -> Row:
    """The row that costs least in bytes moved and in what is computed, near what the operation's tensors are already.

    Args:
        op: the operation.
        have: by tensor the signatures that there are of it.
        price: bytes of each tensor.
        workers: p.
        wanted: of its result.

    Raises:
        PlanError: it cannot give what is wanted.
    """

    def cost(row: Row) -> tuple[float, str]:
        bytes_moved = sum(
            min(_price(op.form.args[name], own, row.args[name], price.get(name, 0.0), workers) for own in owned)
            for name, owned in have.items()
        )
        shared = op.flops / FLOPS_PER_BYTE / (1 if row.kind == "broadcast" else workers)
        return 2 * bytes_moved + shared, _PREFERRED[row.kind]

    every = list(_candidates(op, have, workers))
    row = min(_fitting(op, every, wanted, workers), key=cost)
    if wanted is not None and not wanted.exactly and math.isinf(cost(row)[0]):  # it would move a parameter
        return min(every, key=cost)
    return row


def _price(dims: Dims, own: Signature, wanted: Signature, num_bytes: float, workers: int) -> float:
    """Bytes moved; not to be had where zeros around a part need the size of the whole, which varies with the batch."""
    return math.inf if wanted == P and _varies(dims, own) else moved(own, wanted, num_bytes, workers)


def _varies(dims: Dims, own: Signature) -> bool:
    """Whether a split dimension's size varies with the batch."""
    return isinstance(own, Split) and not all(isinstance(size, int) for _, size in dims[own.dim])


_PREFERRED = {"split": "0", "broadcast": "1", "partial": "2"}
"""Among rows of equal cost: what is partial will have to be reduced."""


def _refuse_exact(op: ShardedOp, wanted: Wanted | None, what: str) -> None:
    if wanted is not None and wanted.exactly:
        raise PlanError(
            f"the signature of the result of operation {op.name!r}",
            got=f"{wanted.signature} for {what}",
            expected="an operation whose result can have a signature of its own",
            remedy="Correct `outputs` of the plan.",
        )


def _divides(dims: Dims, split: Split, workers: int) -> bool:
    """Whether a dimension is long enough, as far as that is known."""
    sizes = [size for _, size in dims[split.dim]]
    return not all(isinstance(size, int) for size in sizes) or split.count(math.prod(sizes)) >= workers


def _fitting(op: ShardedOp, rows: Iterable[Row], wanted: Wanted | None, workers: int) -> list[Row]:
    """The rows whose result is the wanted one, or all if it is one of many that match a pattern and has none."""
    every = list(rows)
    if wanted is None or not op.form.results:
        _refuse_exact(op, wanted, "no tensor")
        return every
    own, dims = wanted.signature, op.form.results[0]
    if isinstance(own, Split) and own.dim < len(dims) and _divides(dims, own, workers):
        row = split_row(op.form, 0, own)
        every += [row] if isinstance(row, Row) else []
    fit = [row for row in every if row.results[:1] == (own,)]
    if not fit and wanted.exactly:
        raise PlanError(
            f"the signature of the result of operation {op.name!r}",
            got=str(wanted.signature),
            expected="one that it can compute: " + ", ".join(sorted({str(row.results[0]) for row in every})),
            remedy="Correct `outputs` of the plan.",
        )
    return fit or every


def _candidates(op: ShardedOp, have: Mapping[str, Sequence[Signature]], workers: int) -> Iterator[Row]:
    """Rows in which something stays as it is. Which worker has the largest number, and so its gradient, none knows."""
    form = op.form
    for name, owned in have.items():
        for own in owned:
            row = split_row(form, name, own) if isinstance(own, Split) else None
            has_gradient = op.differentiable and isinstance(row, Row) and P_MAX in row.results
            if isinstance(row, Row) and not has_gradient and _is_long(form, row, workers):
                yield row
    for row in partial_rows(form):
        if any(P in have[name] and own == P for name, own in row.args.items()):
            yield row
    yield broadcast_row(form)


def _is_long(form: OpForm, row: Row, workers: int) -> bool:
    """Whether every worker gets something of what is split: of nothing, few operators make what they should."""
    args = [(form.args[name], own) for name, own in row.args.items()]
    both = [*args, *zip(form.results, row.results, strict=False)]
    return all(_divides(dims, own, workers) for dims, own in both if isinstance(own, Split))


class _Reading(NamedTuple):
    """That an operation, or the graph's end, reads a value.

    Args:
        op: its name; empty for the end.
        wanted: signature with which it computes.
        given: that of what it contributes to the gradient; None if it contributes nothing.
        of_whole: whether it makes the wanted from the whole value alone, as a part's place in it is not known.
    """

    op: str
    wanted: Signature
    given: Signature | None
    of_whole: bool = False


def _backward(
    ops: Sequence[ShardedOp],
    values: Mapping[str, Signature],
    rows: Mapping[str, Row],
    needed: Mapping[str, Signature],
    sizes: Mapping[str, float],
    weights: Mapping[str, float],
    parts: frozenset[str] = frozenset(),
) -> Deduction:
    """The rest, from the end to the beginning; ``parts``: operations of whose results all gradients are partial."""
    settled = _Settled(values)
    for name, wanted in needed.items():
        settled.readings.setdefault(name, []).append(_Reading("", wanted, wanted))
    made = {op.name for op in ops}
    several: dict[str, set[Signature]] = {}  # gradients of an operation's several results
    for op in reversed(ops):
        is_part = op.takes is not None and op.takes[0] in parts
        reduces = not is_part and _reduces(op, values, sizes, weights)
        gradient = settled.settle(op.name, op.differentiable, reduces, is_part=is_part)
        if op.takes is not None:
            several.setdefault(op.takes[0], set()).update([] if gradient is None else [gradient])
            continue
        of_results = P if P in several.get(op.name, ()) or gradient == P else B
        differentiable = op.differentiable or bool(several.get(op.name))
        row = rows[op.name]
        for name, wanted in row.args.items():
            given = row.gradient_of(name, of_results) if differentiable else None
            of_whole = wanted == P and _varies(op.form.args[name], values.get(name, B))
            settled.readings.setdefault(name, []).append(_Reading(op.name, wanted, given, of_whole))
    if mixed := {name for name, own in several.items() if {B, P} <= own}:  # what is whole would count on each worker
        return _backward(ops, values, rows, needed, sizes, weights, parts | mixed)
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

    def settle(self, name: str, differentiable: bool, reduces: bool, *, is_part: bool = False) -> Signature | None:
        """Settle a value's gradient, its boxings, and how each consumer reads it.

        Args:
            name: of the value.
            differentiable: whether it has a gradient.
            reduces: whether a partial one is reduced here.
            is_part: it is partial whatever the consumers contribute, if the value is broadcast.
        """
        own, readings = self._values.get(name, B), self.readings.get(name, [])
        near = [r for r in readings if is_local(own, r.wanted) and not r.of_whole]
        gradient: Signature | None = None
        if differentiable:
            gradient = own if isinstance(own, Split) else B
        partial = differentiable and own == B and (is_part or any(_contributes_part(r) for r in near))
        if partial and reduces:
            box = self._box(name, own, B, P, B)
            for reading in near:
                self._use(reading, name, box, B, P)
        else:
            gradient = P if partial else gradient
            for reading in near:
                self._use(reading, name, name, own, gradient)
        boxed = {r: B if r.of_whole else r.wanted for r in readings if r not in near}
        for wanted in dict.fromkeys(boxed.values()):
            group = [r for r in boxed if boxed[r] == wanted]
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
