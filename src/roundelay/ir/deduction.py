"""The signatures of a model over one mesh axis, as data: how operations are computed, what is boxed, who reads what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import B, P, Signature, Split

Kind = Literal["broadcast", "split", "partial"]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to compute an operation.

    Args:
        kind: ``broadcast``: every worker computes all of it; ``split``: a label is split; ``partial``: linear arguments
            are partial.
        args: signature of each tensor that it reads, by name.
        results: signature of each result.
    """

    kind: Kind
    args: Mapping[str, Signature]
    results: tuple[Signature, ...]

    def gradient_of(self, arg: str, results: Signature) -> Signature:
        """The signature of what this operation contributes to an argument's gradient.

        Args:
            arg: its name.
            results: signature of its results' gradients, where they are broadcast: B or P.
        """
        own = self.args[arg]
        if isinstance(own, Split):
            return own
        if own == P:
            return B
        return results if self.kind == "broadcast" else P


@dataclass(frozen=True, slots=True)
class ShardedOp:
    """An operation as the deduction sees it.

    Args:
        name: its name, and that of its result.
        form: its form.
        flops: of a forward on the sample.
        takes: for an operation that picks one of another's results: that one's name and the number of the result.
        differentiable: whether a gradient flows back through its result.
    """

    name: str
    form: OpForm
    flops: float
    takes: tuple[str, int] | None = None
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of an operation's result.

    Args:
        signature: the result's.
        exactly: whether it is named, and not one of many that match a pattern: then it is an error if it cannot be.
    """

    signature: Signature
    exactly: bool


@dataclass(frozen=True, slots=True)
class Box:
    """A boxing that moves something, of one value for some of its consumers.

    Args:
        name: of the boxed value.
        value: name of the value.
        source: signature of the value.
        target: signature of the boxed value.
        given: signature of the boxed value's gradient; None if it has none.
        needed: signature of the gradient that the value's producer takes; None likewise.
    """

    name: str
    value: str
    source: Signature
    target: Signature
    given: Signature | None
    needed: Signature | None


@dataclass(frozen=True, slots=True)
class Use:
    """How an operation reads one of its tensors.

    Args:
        value: name of the value that it reads: the tensor itself, or what it is boxed to.
        has: signature of that value.
        wanted: signature that the operation computes with, which each worker makes from it alone.
        once: whether what it contributes to the gradient is the same on every worker and counts once, as the others
            contribute parts.
    """

    value: str
    has: Signature
    wanted: Signature
    once: bool


@dataclass(frozen=True, slots=True)
class Deduction:
    """The signatures of a graph over one axis.

    Args:
        rows: of every operation, by name.
        values: of every value, by name: parameters, inputs, results.
        gradients: of every value that has a gradient, as its producer takes it.
        boxes: what moves, in no order.
        uses: by operation and tensor.
        results: the same for the graph's results.
    """

    rows: Mapping[str, Row]
    values: Mapping[str, Signature]
    gradients: Mapping[str, Signature]
    boxes: tuple[Box, ...]
    uses: Mapping[tuple[str, str], Use]
    results: Mapping[str, Use]
