"""Graphs as data: what a stage computes, for a machine that has none of the person's Python.

A graph is a list of nodes. A node reads nodes before it, by their number; what is called is a name of
:data:`roundelay.ir.plain_operations.ALLOWED`. Bytes from outside are decoded into these types and nothing else, and
checked before anything is done with them::

    decoded(bytes) -> PlainStage      structure, names, references, sizes of what is held
    frontend.plain_stage.rebuilt      arguments against the operators' schemas, sizes of what is made

A node's own name is for messages only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from roundelay.errors import PlanError, did_you_mean
from roundelay.ir.plain_operations import ALLOWED, OPERATORS

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
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(PlainStage)
_Decoded = TypeVar("_Decoded")


def encoded(stage: PlainStage) -> bytes:
    """The stage as bytes (msgpack).

    Raises:
        PlanError: it does not keep the limits, so that nobody would take it.
    """
    check(stage)
    try:
        data = _ENCODER.encode(stage)
    except (OverflowError, ValueError, TypeError) as error:
        raise refused(f"stage {stage.stage}", str(error), "integers of 64 bits") from error
    _check_length(data, LIMITS)
    return data


def decoded(data: bytes, limits: Limits = LIMITS) -> PlainStage:
    """The stage from bytes from outside, checked.

    Raises:
        PlanError: they are no such stage, or break a limit.
    """
    _check_length(data, limits)
    stage = decoded_by(_DECODER.decode, data, "a stage as data")
    check(stage, limits)
    return stage


def decoded_by(decode: Callable[[bytes], _Decoded], data: bytes, what: str) -> _Decoded:
    """What a decoder of msgspec makes of bytes from outside.

    Raises:
        PlanError: they are damaged.
    """
    try:
        return decode(data)
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:  # msgspec's errors are ValueErrors
        raise refused(what, f"{type(error).__name__}: {error!s:.300}", "what `encoded` has written") from error


def check(stage: PlainStage, limits: Limits = LIMITS) -> None:
    """Check everything that needs no torch: names, references, numbers of nodes, what is held, and that parts fit.

    Raises:
        PlanError: naming what is wrong.
    """
    parts = [*stage.segments, *([] if stage.loss is None else [stage.loss.segment])]
    if not parts:
        raise refused(f"stage {stage.stage}", "no segments", "at least one")
    total = 0
    for part in parts:
        total += _check_graph(part.graph, limits, total, 0)
        _check_segment(part)
    if stage.loss is not None:
        _check_loss(stage.loss)
    made = {name for part in parts for name in part.outputs}
    if missing := sorted({*stage.outputs} - made - {*stage.inputs}):
        raise refused(f"stage {stage.stage}", f"an output {missing[0]!r} that no segment makes", "outputs of its own")
    _check_flow(stage, parts)


def refused(subject: str, got: str, expected: str) -> PlanError:
    """The error for data from outside that is not taken."""
    return PlanError(subject, got=got, expected=expected, remedy="It is refused: it was not made by Roundelay's host.")


def references(value: Argument) -> Iterator[int]:
    """Numbers of the nodes that an argument reads."""
    if isinstance(value, Ref):
        yield value.node
    elif isinstance(value, (List, Tuple)):
        for item in value.items:
            yield from references(item)


def _check_length(data: bytes, limits: Limits) -> None:
    if len(data) > limits.encoded_bytes:
        raise refused("a stage as data", f"{len(data):,} bytes", f"at most {limits.encoded_bytes:,}")


def _check_flow(stage: PlainStage, parts: list[PlainSegment]) -> None:
    known = {*stage.inputs}
    for part in parts:
        if missing := sorted({*part.inputs} - known):
            raise refused(
                f"stage {stage.stage}", f"a segment that reads {missing[0]!r}", "values that it receives or has made"
            )
        known |= {*part.outputs}


def _check_segment(part: PlainSegment) -> None:
    what = f"the segment of operations {part.start} to {part.stop}"
    names = [*part.parameters, *part.buffers, *part.inputs]
    own = [node for node in part.graph.nodes if isinstance(node, Input)]
    if len(own) != len(names) + 1:  # and the key
        raise refused(what, f"a graph of {len(own)} inputs", f"{len(names)} of its names, and the key")
    if len(part.graph.outputs) != len(part.outputs):
        raise refused(what, f"{len(part.graph.outputs)} results for {len(part.outputs)} names", "one for each")
    for many in (part.parameters, part.buffers, part.inputs, part.outputs):
        if len({*many}) != len(many):
            raise refused(what, "a name that is given twice", "names of their own")
    ends = (part.parameters, part.inputs, part.buffers)
    for some, of in zip((part.trainable, part.differentiable, part.mutated), ends, strict=True):
        if other := sorted({*some} - {*of}):
            raise refused(what, f"{other[0]!r} among what gets gradients or is changed", "names of its own")


def _check_loss(loss: PlainLoss) -> None:
    if len(loss.sizes) != len(loss.segment.inputs):
        raise refused("the loss", f"sizes of {len(loss.sizes)} values", f"those of {len(loss.segment.inputs)}")
    if loss.segment.parameters or loss.segment.buffers:
        raise refused("the loss", "parameters or buffers", "values only")
    if any(place >= len(loss.sizes) for place, _ in loss.numbers):
        raise refused("the loss", "a number in the place of no input", "one of its inputs")
    for size in (size for of in loss.sizes for size in of):
        if -1 - size >= len(loss.bounds):
            raise refused("the loss", f"a size number {-1 - size}", f"at most {len(loss.bounds)}")


def _check_graph(graph: PlainGraph, limits: Limits, before: int, nesting: int) -> int:
    """Check one graph and those within; returns its number of nodes."""
    if nesting > MAX_NESTING:
        raise refused("a graph as data", "graphs in graphs in graphs", f"at most {MAX_NESTING} levels")
    total, inputs_end = len(graph.nodes), False
    for i, node in enumerate(graph.nodes):
        if before + total > limits.nodes:
            raise refused("a graph as data", f"{before + total:,} nodes", f"at most {limits.nodes:,}")
        if isinstance(node, Input):
            if inputs_end:
                raise refused(f"input {node.name!r}", "a place after other nodes", "inputs first")
            continue
        inputs_end = True
        if isinstance(node, Held):
            _check_held(node)
        elif isinstance(node, Body):
            total += _check_graph(node.graph, limits, before + total, nesting + 1)
        else:
            _check_call(node, i, graph)
    for value in graph.outputs:
        _check_argument(value, "the result of a graph", graph, len(graph.nodes), 0)
    return total


def _check_held(node: Held) -> None:
    if node.dtype not in DTYPES or len(node.shape) > MAX_DIMS:
        raise refused(f"tensor {node.name!r}", f"dtype {node.dtype!r}, {len(node.shape)} dimensions", "a known dtype")
    needed = min(math.prod(node.shape) * DTYPES[node.dtype], 1 << 62)
    if needed != len(node.data):
        raise refused(f"tensor {node.name!r}", f"{len(node.data)} bytes", f"{needed} for its sizes")


def _check_call(node: Call, place: int, graph: PlainGraph) -> None:
    if node.operation not in ALLOWED:
        near = did_you_mean(node.operation, ALLOWED)
        raise refused(f"operation {node.name!r}", f"{node.operation!r}", f"one of {len(ALLOWED)} known names. {near}")
    for value in (*node.args, *node.kwargs.values()):
        _check_argument(value, f"operation {node.name!r} ({node.operation})", graph, place, 0)


def _check_argument(value: Argument, what: str, graph: PlainGraph, place: int, nesting: int) -> None:
    if isinstance(value, Ref):
        if value.node >= place:
            raise refused(what, f"node {value.node} as an argument", f"one of the {place} before it")
    elif isinstance(value, Constant):
        if value.name not in CONSTANTS.get(value.kind, ()):
            raise refused(what, f"{value.kind} {value.name!r} as an argument", f"one of {', '.join(CONSTANTS)}")
    elif isinstance(value, (List, Tuple)):
        if nesting >= MAX_NESTING:
            raise refused(what, "lists in lists in lists", f"at most {MAX_NESTING} levels")
        for item in value.items:
            _check_argument(item, what, graph, place, nesting + 1)
