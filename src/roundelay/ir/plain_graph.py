"""Graphs as data: what a stage computes, for a machine that has none of the person's Python.

A graph is a list of nodes. A node reads nodes before it, by their number; what is called is a name of
:data:`roundelay.ir.plain_operations.ALLOWED`. Bytes from outside are decoded into these types and nothing else, and
checked before anything is done with them::

    ir.plain_bytes.decoded            structure, names, references, sizes of what is held
    frontend.plain_stage.rebuilt      arguments against the operators' schemas, sizes that are written in it

Sizes that it computes from others are bounded where it runs: its process allocates no more than the machine allows
(``cli.memory_bound``), whatever the values are, in the backward too.

A node's own name is for messages only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from roundelay.errors import PlanError
from roundelay.ir.plain_operations import OPERATORS

MAX_NAME = 1024
MAX_DIMS = 64
MAX_NESTING = 4
"""Nesting of lists in arguments, and of graphs in graphs."""

DTYPES = {
    **{"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8},
    **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16},
}
"""Torch's name of a dtype to bytes of an element."""

CONSTANTS = {
    "dtype": frozenset(DTYPES),
    "device": frozenset({"cpu"}),  # of the stage, whatever that is
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}),
    "operator": OPERATORS,
}
"""Kind to names of the constants of torch that may be arguments."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Ref(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="r"):
    """The value of an earlier node."""

    node: Count


class List(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="l"):
    """A list."""

    items: tuple[Argument, ...]


class Tuple(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="t"):
    """A tuple."""

    items: tuple[Argument, ...]


class Constant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="c"):
    """A constant of torch: of a kind and name of :data:`CONSTANTS`."""

    kind: Name
    name: Name


Argument: TypeAlias = bool | int | float | Name | Ref | List | Tuple | Constant | None


class Input(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="input"):
    """An argument of the graph: its name, and the number of dimensions (-1: not known, or no tensor)."""

    name: Name
    ndim: Annotated[int, Meta(ge=-1, le=MAX_DIMS)]


class Held(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="held"):
    """A tensor that the graph holds: its elements in order, in little-endian memory."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...]
    data: bytes


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="body"):
    """A graph that an operation runs."""

    name: Name
    graph: PlainGraph


class Call(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="call"):
    """An operation, its arguments, and the number of dimensions of its result (-1: not known, or no tensor)."""

    name: Name
    operation: Name
    args: tuple[Argument, ...]
    kwargs: dict[Name, Argument]
    ndim: Annotated[int, Meta(ge=-1, le=MAX_DIMS)]


Node: TypeAlias = Input | Held | Body | Call


class PlainGraph(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A graph: nodes in order of execution, and what it returns.

    Args:
        nodes: a node reads earlier ones only; inputs come first.
        outputs: what it returns, a tuple or a list of nodes and plain values.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Argument, ...]


class PlainSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A segment: its graph, whose inputs are parameters, buffers, inputs and the key of random numbers.

    Args:
        graph: what it computes.
        start: number of its first operation in the whole model.
        stop: one past its last.
        parameters: names of those that it owns.
        buffers: names of those that it reads or writes.
        inputs: names of values.
        outputs: names of values.
        trainable: names of parameters that get a gradient.
        differentiable: names of inputs that get a gradient.
        mutated: names of buffers that a forward changes.
        recomputed: whether the backward runs its forward again.
    """

    graph: PlainGraph
    start: Count
    stop: Count
    parameters: tuple[Name, ...]
    buffers: tuple[Name, ...]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    trainable: tuple[Name, ...] = ()
    differentiable: tuple[Name, ...] = ()
    mutated: tuple[Name, ...] = ()
    recomputed: bool = False


class PlainLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loss as the last segment.

    Args:
        segment: its graph takes what the loss reads and the key.
        position: its place among the random operations; -1 if it draws none.
        sizes: for each of its inputs the sizes for which the graph holds: a number, or ``-1 - i`` for the i-th of the
            sizes that may vary; empty for what is no tensor.
        bounds: least and greatest value of each size that may vary.
        numbers: places of the inputs that are numbers of the batch, and the kind of each, as it is sent.
    """

    segment: PlainSegment
    position: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    sizes: tuple[tuple[Annotated[int, Meta(ge=-1024, lt=1 << 62)], ...], ...]
    bounds: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=1024)]
    numbers: tuple[tuple[Count, Count], ...] = ()


class PlainStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage: its segments in order, with the loss on the last one.

    Args:
        stage: its number, from 0.
        precision: in which it computes.
        segments: without the loss.
        loss: the loss; None unless it is the last stage.
        inputs: names of the values that it receives.
        outputs: names of the values that it sends, or of the loss and what comes with it.
    """

    stage: Count
    precision: Name
    segments: tuple[PlainSegment, ...]
    loss: PlainLoss | None
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a graph from outside may need.

    Args:
        encoded_bytes: all of it as it is sent, with the tensors that it holds.
        nodes: in all of its graphs.
        elements: of a tensor that it makes from sizes that are written in it.
    """

    encoded_bytes: int = 64 << 20
    nodes: int = 100_000
    elements: int = 1 << 28


LIMITS = Limits()


def refused(subject: str, got: str, expected: str) -> PlanError:
    """The error for data from outside that is not taken."""
    return PlanError(subject, got=got, expected=expected, remedy="It is refused: it was not made by Roundelay's host.")
