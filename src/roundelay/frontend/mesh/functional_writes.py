"""Makes new values of writes in place, for a mesh: of what workers have in parts or as addends, none can be written.

``x[:, :4] = y`` becomes ``x' = slice_scatter(x, y, 1, 0, 4)``, which everybody reads afterwards; views of ``x`` that
are read after the write are taken anew of ``x'``. Writes into buffers stay. So do those through a view that is not
known here: there the graph cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.fx
from torch.fx import Node

from roundelay.frontend.export.export import Exported
from roundelay.frontend.graph_passes import counterpart
from roundelay.frontend.graph_run import declared_writes, is_mutable

aten = torch.ops.aten

Make = Callable[..., Node]
"""Adds an operation to the new graph: its target, and its arguments."""


def _slice_back(make: Make, whole: Node, part: Node, args: tuple[Any, ...]) -> Node:
    return make(aten.slice_scatter.default, whole, part, *args)


def _select_back(make: Make, whole: Node, part: Node, args: tuple[Any, ...]) -> Node:
    return make(aten.select_scatter.default, whole, part, *args)


def _transposed_back(make: Make, whole: Node, part: Node, args: tuple[Any, ...]) -> Node:
    return make(aten.transpose.int, part, *args)


def _shaped_back(make: Make, whole: Node, part: Node, args: tuple[Any, ...]) -> Node:
    return make(aten.reshape_as.default, part, whole)


_BACK: dict[Any, Callable[[Make, Node, Node, tuple[Any, ...]], Node]] = {
    aten.slice.Tensor: _slice_back,
    aten.select.int: _select_back,
    aten.transpose.int: _transposed_back,
    aten.view.default: _shaped_back,
    aten.unsqueeze.default: _shaped_back,
    aten.squeeze.dim: _shaped_back,
    aten.squeeze.dims: _shaped_back,
}
"""View to how the whole is made of itself and what has become of the view."""


def _copied(make: Make, old: Node, source: Any, *_: Any) -> Node:
    if not isinstance(source, Node):
        return make(aten.full_like.default, old, source)
    if source.meta["val"].dtype != old.meta["val"].dtype:
        source = make(aten.to.dtype, source, old.meta["val"].dtype)
    if source.meta["val"].shape != old.meta["val"].shape:
        source = make(aten.expand_as.default, source, old)
    kept = old.meta["val"].is_contiguous()
    layout = torch.contiguous_format if kept else torch.preserve_format  # views of it follow, written for its strides
    return make(aten.clone.default, source, memory_format=layout)


def _filled(make: Make, old: Node, value: Any) -> Node:
    if isinstance(value, Node):
        return _copied(make, old, value)
    return make(aten.full_like.default, old, value)


_NEW: dict[Any, Callable[..., Node]] = {
    aten.copy_.default: _copied,
    aten.fill_.Scalar: _filled,
    aten.fill_.Tensor: _filled,
    aten.zero_.default: lambda make, old: make(aten.zeros_like.default, old),
}
"""What becomes of what is written into, where no operator of the same arguments says it."""


@dataclass(frozen=True)
class _View:
    """Of what a value is a view, and by which views of views."""

    base: Node
    chain: tuple[Node, ...] = ()


def without_writes(exported: Exported) -> Exported:
    """The graph without writes in place; values keep their names."""
    views = _views(exported)
    written = {views[node.args[0]].base for node in exported.module.graph.nodes if _writes(node)}
    written -= _unknown_bases(exported, views)
    return _Rewriting(exported, views, written).result() if written else exported


def _writes(node: Node) -> bool:
    """Whether an operation writes into its first argument."""
    return node.op == "call_function" and is_mutable(node.target) and isinstance(node.args[0], Node)


def _shares(node: Node, first: Node) -> bool:
    """Whether a value lies in the memory of an operation's first argument; a list of values, whether it may."""
    own, other = node.meta.get("val"), first.meta.get("val")
    if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(own.untyped_storage()._cdata == other.untyped_storage()._cdata)
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(r.alias_info is not None for r in returns) or getattr(node.target, "__name__", "") == "getitem"


def _views(exported: Exported) -> dict[Node, _View]:
    """Every value as a view of the value in whose memory it lies."""
    views: dict[Node, _View] = {}
    for node in exported.module.graph.nodes:
        first = node.args[0] if node.op == "call_function" and node.args else None
        views[node] = _View(node)
        if isinstance(first, Node) and (_writes(node) or _shares(node, first)):
            of = views[first]
            views[node] = of if _writes(node) else _View(of.base, (*of.chain, node))
    return views


def _unknown_bases(exported: Exported, views: dict[Node, _View]) -> set[Node]:
    """Values that cannot be made anew: state, inputs, and what is written by or through something that is not known."""
    unknown = {node for node in exported.module.graph.nodes if node.op != "call_function"}
    for node in exported.module.graph.nodes:
        if node.op != "call_function":
            continue
        if not _writes(node):
            hidden = declared_writes(node.target, node.args, node.kwargs) if is_mutable(node.target) else []
            inner = not isinstance(node.target, torch._ops.OpOverload) and any(
                isinstance(arg, Node) and arg.op == "get_attr" for arg in node.args
            )  # a graph of its own, which may write
            reads = node.all_input_nodes if inner else [arg for arg in hidden if isinstance(arg, Node)]
            unknown |= {views[arg].base for arg in reads}
            continue
        target = node.args[0]
        assert isinstance(target, Node)
        of = views[target]
        writes = declared_writes(node.target, node.args, node.kwargs)
        known = len(writes) == 1 and (node.target in _NEW or counterpart(node) is not None)
        if not known or any(view.target not in _BACK or view.kwargs for view in of.chain):
            unknown.add(of.base)
    return unknown


@final
class _Rewriting:
    """One pass through a graph.

    Args:
        exported: the model.
        views: of every value.
        written: values that are made anew by each write.
    """

    def __init__(self, exported: Exported, views: dict[Node, _View], written: set[Node]) -> None:
        self._exported, self._views, self._written = exported, views, written
        self._graph = torch.fx.Graph()
        self._copied: dict[Node, Node] = {}
        self._made_at: dict[Node, int] = {}  # number of writes that a copy has seen
        self._writes: dict[Node, int] = dict.fromkeys(written, 0)
        self._current: dict[Node, Node] = {}

    def result(self) -> Exported:
        """The graph."""
        for node in self._exported.module.graph.nodes:
            of = self._views[node]
            if _writes(node) and of.base in self._written:
                self._write(node, of)
            else:
                self._copied[node] = self._graph.node_copy(node, self._read)
                if node in self._written:
                    self._current[node] = self._copied[node]
            self._made_at[node] = self._writes.get(of.base, 0)
        return replace(self._exported, module=torch.fx.GraphModule(self._exported.module, self._graph))

    def _read(self, node: Node) -> Node:
        """What an operation reads now in place of a value: where its memory has been written, another one."""
        of = self._views[node]
        if of.base in self._written and self._made_at[node] < self._writes[of.base]:
            value = self._current[of.base]
            for view in of.chain:
                value = self._viewed(view, value)
            self._copied[node], self._made_at[node] = value, self._writes[of.base]
        return self._copied[node]

    def _viewed(self, view: Node, value: Node) -> Node:
        rest = torch.fx.node.map_arg(view.args[1:], self._read)
        return self._made(view, view.target, value, *rest, **view.kwargs)

    def _write(self, node: Node, of: _View) -> None:
        wholes = [self._current[of.base]]
        for view in of.chain:
            wholes.append(self._viewed(view, wholes[-1]))
        old, make = wholes.pop(), self._maker(node)
        rest = torch.fx.node.map_arg(node.args[1:], self._read)
        kwargs = torch.fx.node.map_arg(node.kwargs, self._read)
        if node.target in _NEW:
            new = _NEW[node.target](make, old, *rest)
        else:
            new = self._made(node, counterpart(node), old, *rest, **kwargs)
            if new.meta["val"].dtype != old.meta["val"].dtype:
                new = make(aten.to.dtype, new, old.meta["val"].dtype)
        new = self._named(node, new)
        whole = new
        for view, before in zip(reversed(of.chain), reversed(wholes), strict=True):
            whole = _BACK[view.target](make, before, whole, torch.fx.node.map_arg(view.args[1:], self._read))
        self._current[of.base] = whole
        self._writes[of.base] += 1
        self._copied[node] = new

    def _named(self, node: Node, value: Node) -> Node:
        """The value under the write's name: a copy where the value has one of its own."""
        made = self._graph.create_node("call_function", aten.alias.default, (value,), {}, node.name)
        made.meta = dict(node.meta) | {"val": value.meta["val"]}
        return made

    def _maker(self, node: Node) -> Make:
        return lambda target, *args, **kwargs: self._made(node, target, *args, **kwargs)

    def _made(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self._graph.create_node("call_function", target, args, kwargs, f"{like.name}_anew")
        value = target(
            *torch.fx.node.map_arg(args, lambda n: n.meta["val"]),
            **torch.fx.node.map_arg(kwargs, lambda n: n.meta["val"]),
        )
        made.meta = dict(like.meta) | {"val": value}
        return made
