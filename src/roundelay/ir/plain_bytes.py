"""Stages as data to bytes and back: what comes from outside is decoded into known types, and checked, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec

from roundelay.errors import did_you_mean
from roundelay.ir.plain_graph import (
    CONSTANTS,
    DTYPES,
    LIMITS,
    MAX_DIMS,
    MAX_NESTING,
    Argument,
    Body,
    Call,
    Constant,
    Held,
    Input,
    Limits,
    List,
    PlainGraph,
    PlainLoss,
    PlainSegment,
    PlainStage,
    Ref,
    Tuple,
    refused,
)
from roundelay.ir.plain_operations import ALLOWED

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
