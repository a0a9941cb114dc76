"""The logical graph of a captured model: plain data, without torch.

A graph is a list of operations in execution order. Operation number ``i`` produces one value, which has the operation's
name. A *cut* after operation ``i`` separates operations ``0..i`` from the rest; :attr:`Graph.cuts` lists the legal
ones.

Value names are shared by all stages of a run:

=================  ====================================================================
``add_3``          the result of operation ``add_3``
``input.0``        the first tensor leaf of the model's call
``batch.x``        a tensor of the user's batch that the loss reads
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
"""The number of labels over which the loss is a mean; the last stage returns it with such a loss."""
METRIC, TERMS = "metric.", "metric-count."
"""Prefixes of the names of metrics that the loss function returns, and of their numbers of terms, if it gives any."""


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
        name: its name and that of the value it produces.
        target: the operator, for example ``aten.linear.default``.
        module: path of the module that called it.
        reads: values read, inputs and earlier operations, without repetition.
        parameters: parameters read, by their first name in the model.
        buffers: buffers read or written.
        flops: floating-point operations of the forward pass on the sample micro-batch.
        draws: position among the graph's random operations, or -1 if it uses no random number.
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
    """One parameter: name, shape, bytes, whether it is trained, and torch's name of its dtype."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    trainable: bool
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole model and its loss.

    Args:
        ops: in execution order.
        inputs: tensor leaves of the model's call, as ``input.i``.
        batch: tensors of the batch that the loss reads, as ``batch.path``.
        outputs: values (or inputs) that the loss reads.
        values: every value by name, inputs and batch included.
        parameters: every parameter by its first name.
        buffers: name to bytes.
        cuts: indices ``i`` after which the graph may be cut.
        loss_counts: whether the loss returns (sum, count) instead of a mean.
        fingerprint: identity of operations and parameters, independent of the sample's sizes.
        sample_rows: rows of the sample micro-batch.
        metrics: values that the loss function returns in addition to the loss, as ``metric.NAME`` and
            ``metric-count.NAME``.
        min_rows: smallest number of rows of a micro-batch, unless the whole batch has fewer.
        labels_per_row: labels per row of the sample, where the loss is a mean over labels and some may be ignored;
            else 0.
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
        """Return the position of the operation called ``name``.

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
    """Seconds of every operation, in the graph's order; the last entry is the loss.

    Args:
        forward_s: seconds of a forward on one micro-batch.
        backward_s: seconds of a backward on one micro-batch, without recomputing its forward.
        update_s: seconds of one update of the parameters that this operation is the first to use.
        add_s: seconds of adding a micro-batch's gradients of these parameters to those before; empty: not known.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    add_s: tuple[float, ...] = ()

    def added_s(self, micro_batches: int) -> tuple[float, ...]:
        """Seconds of adding up gradients for each micro-batch of a batch, whose first one has nothing to add to."""
        known = self.add_s or (0.0,) * len(self.forward_s)
        return tuple([seconds * (micro_batches - 1) / micro_batches for seconds in known])
