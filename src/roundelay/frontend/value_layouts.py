"""How large values are for how many rows, from the sizes that the export has traced."""

from __future__ import annotations

from typing import Any

from roundelay.frontend.export.export import Exported
from roundelay.ir.graph import BATCH, INPUT, WEIGHT, Graph
from roundelay.ir.value_layout import ValueLayout


def layout_of(exported: Exported, graph: Graph, name: str) -> ValueLayout:
    """What is known of a value; a size is, where it is fixed or a multiple of the rows.

    Args:
        exported: the model.
        graph: its description.
        name: of the value.
    """
    if name.startswith(WEIGHT):
        parameter = graph.parameters[name.removeprefix(WEIGHT)]
        return ValueLayout("tensor", parameter.dtype, parameter.shape)
    value = graph.values[name]
    if value.kind != "tensor":
        return ValueLayout(value.kind, "", ())
    if name.startswith((INPUT, BATCH)):  # whatever the batches have
        return ValueLayout("tensor", "", (None,) * len(value.shape))
    traced = _traced(exported, name)
    if len(traced) != len(value.shape):
        return ValueLayout("tensor", value.dtype, (None,) * len(value.shape))
    rows = _rows(exported, graph)
    sizes = [_size(size, seen, rows, graph.sample_rows) for size, seen in zip(traced, value.shape, strict=True)]
    return ValueLayout("tensor", value.dtype, tuple(sizes))


def _size(traced: Any, seen: int, rows: Any, sample_rows: int) -> int | None:
    """A size as :class:`ValueLayout` has it; None unless it fits what the sample has."""
    if isinstance(traced, int):
        return traced if traced == seen else None
    if rows is None:
        return None
    of_each = traced.node.expr / rows
    return -int(of_each) if of_each.is_Integer and int(of_each) * sample_rows == seen > 0 else None


def _rows(exported: Exported, graph: Graph) -> Any:
    """The symbol of the number of rows; None where tensors of the sample differ in their number."""
    data = [graph.values[name] for name in (*graph.inputs, *graph.batch)]
    if {value.shape[0] for value in data if value.shape} != {graph.sample_rows}:
        return None
    for node in exported.module.graph.nodes:
        role = exported.roles.get(node.name)
        if role is not None and role.kind == "input" and (sizes := _traced(exported, node.name)):
            return None if isinstance(sizes[0], int) else sizes[0].node.expr
    return None


def _traced(exported: Exported, name: str) -> tuple[Any, ...]:
    """The sizes of a node's tensor when it was exported: numbers, or symbolic ones."""
    node = next((node for node in exported.module.graph.nodes if node.name == name), None)
    return tuple(getattr(node.meta.get("val"), "shape", ())) if node is not None else ()
