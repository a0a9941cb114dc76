"""The graph with its boxings: each is an operation that passes a value on, after which the graph is cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from roundelay.errors import PlanError
from roundelay.ir.deduction import Box, Deduction
from roundelay.ir.graph import Graph, Op
from roundelay.ir.sbp import B, Signature, Split, local_shape

BOX = "box"
"""Target of the operations that are boxings."""


def boxed_graph(graph: Graph, deduction: Deduction) -> Graph:
    """Insert every boxing at the first place behind its value where the graph can be cut.

    Raises:
        PlanError: there is none before the first consumer.
    """
    renamed: dict[str, dict[str, str]] = {}  # by operation: value to what it reads instead
    for (reader, name), use in deduction.uses.items():
        if use.value != name:
            renamed.setdefault(reader, {})[name] = use.value
    position = {op.name: i for i, op in enumerate(graph.ops)}
    inserted: dict[int, list[Box]] = {}
    for box in deduction.boxes:
        readers = [position[op] for op, names in renamed.items() if box.name in names.values()]
        inserted.setdefault(_place(graph, box, position, min(readers, default=len(graph.ops))), []).append(box)
    ops: list[Op] = []
    cuts: list[int] = []
    values = dict(graph.values)
    for i, op in enumerate(graph.ops):
        names = renamed.get(op.name, {})
        ops.append(replace(op, reads=tuple(dict.fromkeys(names.get(name, name) for name in op.reads))))
        if i in graph.cuts:
            cuts.append(len(ops) - 1)
        for box in inserted.get(i, ()):
            ops.append(Op(box.name, BOX, op.module, (box.value,), (), (), 0, -1))
            cuts.append(len(ops) - 1)
            values[box.name] = replace(graph.values[box.value], name=box.name)
    results = {name: use.value for name, use in deduction.results.items()}
    outputs = tuple(results.get(name, name) for name in graph.outputs)
    last = len(ops) - 1
    return replace(
        graph, ops=tuple(ops), cuts=tuple(cut for cut in cuts if cut != last), values=values, outputs=outputs
    )


def _place(graph: Graph, box: Box, position: Mapping[str, int], before: int) -> int:
    """After which operation a boxing stands."""
    legal = {*graph.cuts, len(graph.ops) - 1}
    if box.value in position:
        for i in range(position[box.value], before):
            if i in legal:
                return i
    raise PlanError(
        f"the boxing of {box.value!r}",
        got=f"{box.source} that must become {box.target} where the graph cannot be cut",
        expected="a place between the operation and its first consumer at which only tensors and numbers pass",
        remedy="Give other signatures to the operations around it.",
    )


def segment_ends(boxed: Graph, stages: Sequence[Sequence[str]], boxes: Iterable[Box]) -> list[list[str]]:
    """The ends of every stage's segments, with one at every boxing.

    Args:
        boxed: the graph with its boxings.
        stages: for each stage the operations that end its segments.
        boxes: all of them.
    """
    position = {op.name: i for i, op in enumerate(boxed.ops)}
    at = sorted(position[box.name] for box in boxes)
    ends, start = [], -1
    for names in stages:
        last = position[names[-1]] if names is not stages[-1] else len(boxed.ops) - 1
        own = sorted({*(i for i in at if start < i < last), *(position[name] for name in names[:-1]), last})
        ends.append([boxed.ops[i].name for i in own])
        start = last
    return ends


def with_local_sizes(graph: Graph, deduction: Deduction, places: Mapping[str, str], parts: int) -> Graph:
    """The graph with the bytes that the first worker of an axis has of each value and parameter."""
    boxes = {box.name: box.target for box in deduction.boxes}
    values = {}
    for name, value in graph.values.items():
        signature = boxes.get(name) or deduction.values.get(name, B)
        values[name] = replace(value, num_bytes=_local_bytes(value.shape, value.num_bytes, signature, parts))
    parameters = {}
    for name, parameter in graph.parameters.items():
        signature = deduction.values.get(places.get(name, ""), B)
        num_bytes = _local_bytes(parameter.shape, parameter.num_bytes, signature, parts)
        parameters[name] = replace(parameter, num_bytes=num_bytes)
    return replace(graph, values=values, parameters=parameters)


def _local_bytes(shape: tuple[int, ...], num_bytes: int, signature: Signature, parts: int) -> int:
    if not isinstance(signature, Split) or not num_bytes:
        return num_bytes
    whole, own = shape[signature.dim], local_shape(shape, signature, parts, 0)[signature.dim]
    return num_bytes // whole * own
