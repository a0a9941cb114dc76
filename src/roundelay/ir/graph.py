"""The logical graph: what capture hands to everything else, as plain data without torch.

A graph is a list of operations in execution order. Operation number ``i`` makes one value that bears the operation's
name. A *cut* after operation ``i`` separates operations ``0..i`` from the rest; :attr:`Graph.cuts` lists the legal
ones.

Value names are shared by all stages of a run:

=================  ====================================================================
``add_3``          what operation ``add_3`` makes
``input.0``        the first tensor leaf of the model's call
``batch.x``        a tensor of the person's batch that the loss reads
``weight.NAME``    a parameter used by several stages, sent by the stage that owns it
=================  ====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roundelay.errors import InternalError

ValueKind = Literal["tensor", "number", "other"]

INPUT = "input."
BATCH = "batch."
WEIGHT = "weight."
LOSS = "loss"
COUNT = "loss.count"
LABELS = "loss.labels"
"""The number of labels over which a loss is the mean, beside it where it is one."""
METRIC, TERMS = "metric.", "metric-count."
"""Before the name of a metric that the loss returns beside the loss, and of the number of its terms, if it says one."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the graph, as seen on the sample micro-batch.

    Args:
        name: unique in the graph.
        kind: only tensors and numbers may cross a cut.
        shape: sizes on the sample micro-batch; empty for numbers.
        dtype: torch's name without ``torch.``; ``int`` or ``float`` for numbers.
        num_bytes: bytes of the elements on the sample micro-batch.
        requires_grad: whether a gradient flows back through it.
    """

    name: str
    kind: ValueKind
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Args:
        name: its name and that of the value it makes.
        target: the operator, for example ``aten.linear.default``.
        module: path of the module that called it, for people.
        reads: values read, inputs and earlier operations, without repetition.
        parameters: parameters read, by their first name in the model.
        buffers: buffers read or written.
        flops: floating-point operations of the forward pass on the sample micro-batch.
        draws: position among the graph's random operations, or -1 if it draws no random number.
    """

    name: str
    target: str
    module: str
    reads: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    flops: int
    draws: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: name, shape, bytes, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    trainable: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole model with its loss.

    Args:
        ops: in execution order.
        inputs: tensor leaves of the model's call, as ``input.i``.
        batch: tensors of the batch that the loss reads, as ``batch.path``.
        outputs: values (or inputs) that the loss reads.
        values: every value by name, inputs and batch included.
        parameters: every parameter by its first name.
        buffers: name to bytes.
        cuts: indices ``i`` after which the graph may be cut.
        loss_counts: the loss returns (sum, count) instead of a mean.
        fingerprint: identity of operations and parameters, independent of the sample's sizes.
        sample_rows: rows of the sample micro-batch.
        metrics: values that the loss makes beside the loss, as ``metric.NAME`` and ``metric-count.NAME``.
        min_rows: rows that a micro-batch of a batch has at least, where the batch has as many.
        labels_per_row: of the sample, where the loss is a mean over labels, some of which may be left out; else 0.
        one_row: why a batch of a single row cannot be trained on; empty if it can.
    """

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    batch: tuple[str, ...]
    outputs: tuple[str, ...]
    values: dict[str, Value] = field(hash=False)
    parameters: dict[str, Parameter] = field(hash=False)
    buffers: dict[str, int] = field(hash=False)
    cuts: tuple[int, ...]
    loss_counts: bool
    fingerprint: str
    sample_rows: int
    metrics: tuple[str, ...] = ()
    min_rows: int = 1
    labels_per_row: float = 0.0
    one_row: str = ""

    def index(self, name: str) -> int:
        """Position of the operation called ``name``.

        Raises:
            InternalError: there is none.
        """
        for i, op in enumerate(self.ops):
            if op.name == name:
                return i
        raise InternalError(
            f"operation {name!r} of the graph",
            got="no such operation",
            expected=f"one of {len(self.ops)} names, from {self.ops[0].name!r} to {self.ops[-1].name!r}",
            remedy="Report this as a bug of Roundelay.",
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of every operation, in the graph's order; the loss stands behind the last one.

    Args:
        forward_s: seconds of a forward on one micro-batch.
        backward_s: seconds of a backward on one micro-batch, without a repeated forward.
        update_s: seconds of one update of the parameters that the operation is the first to use.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
