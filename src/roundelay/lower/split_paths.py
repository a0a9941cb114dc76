"""Follow a split back through a graph, from what an operation reads to the columns of weights that make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roundelay.ir.deduction import ShardedOp
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import Signature, Split
from roundelay.lower.op_rows import Coarser, split_row


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a split cannot be followed further.

    Args:
        why: in words, with ``{op}`` in place of the operation.
        op: its name.
    """

    why: str
    op: str


@dataclass(slots=True)
class Walk:
    """Where a split has been followed.

    Args:
        ops: operations that compute parts.
        values: signatures of their results.
        seeds: signatures of the weights to which it led.
        columns: whether it led to the columns of a product or a table.
    """

    ops: set[str]
    values: dict[str, Split] = field(default_factory=dict)
    seeds: dict[str, Signature] = field(default_factory=dict)
    columns: bool = False


@dataclass(frozen=True, slots=True)
class Paths:
    """Who makes and who reads the values of a graph.

    Args:
        ops: by name.
        readers: names of the operations that read a value.
        made_of: what is made of a parameter alone by what is linear in it, such as its transposed; and itself.
    """

    ops: Mapping[str, ShardedOp]
    readers: Mapping[str, Sequence[str]]
    made_of: Mapping[str, str]

    @staticmethod
    def of(ops: Sequence[ShardedOp], parameters: Mapping[str, Sequence[int]]) -> Paths:
        """Those of a graph, whose operations are in order."""
        readers: dict[str, list[str]] = {}
        made_of = {name: name for name in parameters}
        for op in ops:
            for name in {*op.form.args, *([op.takes[0]] if op.takes else [])} if op.form.results else ():
                readers.setdefault(name, []).append(op.name)
            if len(op.form.args) == len(op.form.linear) == 1 and (name := next(iter(op.form.args))) in made_of:
                made_of[op.name] = made_of[name]
        return Paths({op.name: op for op in ops}, readers, made_of)

    def product_of(self, op: ShardedOp) -> tuple[str, str] | None:
        """The factors of a product with a weight: the one that is no weight, and the weight."""
        for group in op.form.linear:
            for weight in sorted(group & self.made_of.keys()):
                others = [n for n in op.form.args if n not in self.made_of and n not in group]
                for x in others:
                    if _contracts(op.form, x, weight):
                        return x, weight
        return None

    def back(self, value: str, split: Split, walk: Walk) -> Stop | Coarser | None:
        """Follow a split back to weights; a step if that is impossible, or if more numbers must stay together.

        Of a value without a gradient that cannot be followed, as a buffer or a mask, each worker takes its part.
        """
        if value in self.made_of and self.made_of[value] == value:
            alike = walk.seeds.setdefault(value, split) == split
            return (
                None if alike else Stop("{op} reads a weight that would be split in two ways", self.readers[value][0])
            )
        if value in walk.values:
            alike = walk.values[value] == split
            return None if alike else Stop("what {op} makes would be split in two ways", value)
        op = self.ops.get(value)
        if op is None:
            return None
        before = {*walk.ops}, {**walk.values}, {**walk.seeds}, walk.columns
        step = self._before(op, split, walk)
        if isinstance(step, Stop) and not op.differentiable and value not in self.made_of:
            walk.ops, walk.values, walk.seeds, walk.columns = before
            return None
        return step

    def _before(self, op: ShardedOp, split: Split, walk: Walk) -> Stop | Coarser | None:
        """Follow a split of an operation's result back through what it reads."""
        walk.ops.add(op.name)
        walk.values[op.name] = split
        number = 0
        if op.takes is not None:
            source, number = op.takes
            op = self.ops[source]
            walk.ops.add(op.name)
            walk.values.setdefault(op.name, split)
        row = split_row(op.form, number, split)
        if isinstance(row, Coarser):
            return row
        if row is None:
            return Stop("no signature of {op} splits it", op.name)
        product = self.product_of(op)
        for name, wanted in row.args.items():
            if not isinstance(wanted, Split):
                continue
            if product is not None and name not in self.made_of:
                return Stop("the rows that {op} multiplies would be split, not the columns of its weight", op.name)
            step = self.back(name, wanted, walk)
            if step is not None:
                return step
        walk.columns |= product is not None or any(is_table(op.form, name) for name in row.args if name in self.made_of)
        return None


def is_table(form: OpForm, name: str) -> bool:
    """Whether an argument's rows are found only in it: nothing is multiplied with them, and no result has them."""
    if not form.args[name]:
        return False
    (rows, _), *_ = form.args[name][0]
    others = [dims for other, dims in form.args.items() if other != name]
    labels = {label for dims in (*others, *form.results) for factors in dims for label, _ in factors}
    return rows is not None and rows not in labels


def _contracts(form: OpForm, x: str, weight: str) -> bool:
    """Whether of a matrix, or of several, one dimension is summed over with the last of another argument."""
    labels = {label for factors in form.args[weight] for label, _ in factors if label is not None}
    kept = {label for dims in form.results for factors in dims for label, _ in factors}
    summed = {label for factors in form.args[x][-1:] for label, _ in factors}
    return len(form.args[weight]) in (2, 3) and len(labels) > 1 and labels - kept == summed
